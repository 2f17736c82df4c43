"""How a model of one sequence is called, which kind it is, and which output is meant."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shapes.frames import of_frames
from veriformer.properties.adapters.shapes.images import text_with_image, with_its_own_token
from veriformer.properties.adapters.shapes.laid_out import of_one_length
from veriformer.properties.adapters.shapes.latents import of_own_queries
from veriformer.properties.adapters.shapes.towers import of_two_towers
from veriformer.properties.adapters.unknown.arguments import Argument, by_role
from veriformer.properties.adapters.unknown.insisting import called
from veriformer.properties.adapters.unknown.parts import table_added
from veriformer.properties.adapters.unknown.stacks import image_of, stack_inside
from veriformer.properties.adapters.unknown.understanding import (
    STACKS,
    B,
    NotCalledError,
    T,
    Understood,
    basis,
    embeds,
    first_axis_is_time,
    given_as,
    shape_of,
    time_first,
    tokens_of,
    unknown,
    with_head,
)
from veriformer.properties.adapters.unknown.wiring import Wiring, picks, reached_by
from veriformer.properties.subject.sizes import DrawnConfig


def of_one_sequence(
    sample: nn.Module, sizes: DrawnConfig, kind: str | None, arguments: Sequence[Argument], name: str
) -> Understood:
    """Find out how a model of one sequence is called; arguments and errors as of `calling.understood`."""
    problems: list[tuple[str, Exception]] = []
    if kind in (None, "classifier") and (towers := of_two_towers(sample, sizes, arguments)) is not None:
        return towers
    captioned = text_with_image(sample, sizes, arguments)
    if captioned is not None:
        wiring, arguments, told = captioned
        x = tokens_of(sizes.vocab_size, B, T)
        found = _read(sample, sizes, kind, arguments, name, wiring, "tokens", x, wiring.call(sample, x))
        if found is not None:
            own = with_its_own_token(sample, found.wiring, x, sizes.vocab_size)
            is_moved = own is not found.wiring
            moved = ["output t is of the tokens before t: judged is that of t + 1"] * is_moved
            return replace(found, wiring=own, notes=(told, *found.notes, *moved), one_longer=is_moved)
    for what, x in _attempts(sample, sizes, kind):
        wiring = Wiring(("x",), basis(arguments, "x", sample))
        if missing := unknown(arguments, dict(wiring.given)):
            if kind in (None, "classifier") and (frames := of_frames(sample, arguments)) is not None:
                return frames
            raise NotCalledError(
                f"{name}.forward needs the argument {missing[0]!r}, of which nothing is known; write "
                f"Subject(kind=..., build=..., forward=lambda m, x: m(x, {missing[0]}=...))"
            )
        try:
            wiring, output = called(wiring, sample, arguments, x)
        except Exception as problem:
            problems.append((what, problem))
            continue
        found = _read(sample, sizes, kind, arguments, name, wiring, what, x, output)
        if found is not None:
            return found
        problems.append((what, TypeError(f"it gave {shape_of(output)}")))
    if kind in (None, "classifier") and (frames := of_frames(sample, arguments)) is not None:
        return frames
    if kind in (None, "classifier") and (latents := of_own_queries(sample, sizes, arguments)) is not None:
        return latents
    if (image := image_of(sample)) is not None and (inside := stack_inside(sample, image, sizes.d_model)):
        path, loops = inside
        told = (f"judged is its stack {path} alone, on embeddings: of the rest, which takes images, how "
                "patches become tokens is judged, not positions, class token and head")  # fmt: skip
        part = f"torch.nn.Sequential(*{{model}}.{path})" if loops else f"{{model}}.{path}"
        channels, height, width = image.shape[1:]
        return Understood("encoder", Wiring(("x",), {"*first": "x"}), "embeddings", (), (told,), part,
                          image=(channels, height, width), enters=f"{path}[0]" if loops else path,
                          declares={"positions": "none", "causal": False})  # fmt: skip
    if kind in (None, "classifier") and (laid := of_one_length(sample, sizes, arguments)) is not None:
        return laid
    what, first = problems[0]
    said = str(first) if str(first).startswith("it gave") else f"raised {type(first).__name__}: {first}"
    shown = f"{'token ids' if what == 'tokens' else what} {given_as(what, sizes)}"
    raise NotCalledError(
        f"{name} was called with {shown} and {said}; say what it is: --kind KIND, or write a Subject"
    ) from first


def _attempts(sample: nn.Module, sizes: DrawnConfig, kind: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield what may go in: tokens where there is a table for them, embeddings, and the other way round."""
    tokens = tokens_of(sizes.vocab_size, B, T)
    embeddings = torch.randn(B, T, sizes.d_model, generator=torch.Generator().manual_seed(0))
    both = [("tokens", tokens), ("embeddings", embeddings)]
    yield from both if embeds(sample) or kind == "tokens" else both[::-1]


def _read(
    sample: nn.Module, sizes: DrawnConfig, kind: str | None, arguments: Sequence[Argument], name: str, wiring: Wiring,
    what: str, x: Tensor, output: Any,
) -> Understood | None:  # fmt: skip
    """Return what an output says of the model; None if it says nothing."""
    notes: list[str] = []
    labels = [a for a in by_role(arguments, "labels") if a.name not in wiring.given]
    at_all = [
        (w, t) for w, t in picks(output, (B, T), B * T) if (t.ndim == 3 and t.shape[1] == T) or t.shape[0] == B * T
    ]
    if not at_all and labels and what == "tokens" and kind != "classifier":
        label = labels[0].name
        more = wiring.having(**{label: "x.contiguous()"})
        try:
            found = picks(more.call(sample, x), (B, T), B * T)
        except Exception:  # labels of another shape: it is a classifier
            found = []
        if found and (found[0][1].shape[:2] == (B, T) or found[0][1].shape[0] == B * T):
            wiring, at_all = more, found
            notes.append(f"called with {label}=tokens: without it gives the logits of the last position alone")
    candidates = at_all or picks(output, (B, T), B * T)
    if not candidates and isinstance(output, Tensor) and output.shape == (B,) and output.is_floating_point():
        candidates = [(".unsqueeze(-1)", output[:, None])]
    if not candidates:
        return None
    if what == "tokens" and len(candidates) > 1:  # logits before hidden states
        candidates = sorted(
            candidates, key=lambda one: one[1].shape[-1] not in (sizes.vocab_size, sizes.vocab_size + 1)
        )
    where, tensor = candidates[0]
    wiring = replace(wiring, pick=where)
    shape = tuple(tensor.shape)
    if where:
        notes.append(f"of what it gives, output{where} is judged")
    if (len(shape) == 3 and shape[:2] == (B, T)) or shape[0] == B * T:
        width = shape[-1]
        if time_first(sample, sizes, wiring, x):
            wiring = first_axis_is_time(wiring)
            notes.append("its first axis is time: found by changing one input and seeing which outputs change")
        if what == "embeddings":
            added = table_added(sample, wiring, x) if kind in (None, "positions") else None
            if added is not None:
                return Understood("positions", added[0], None, (), (*notes, *added[1]))
            told, why = (kind, []) if kind else _part_of_a_model(sample, sizes, wiring, x, name)
            return Understood(told, wiring, what if told in STACKS else None, (), tuple(notes + why))
        wiring, width, of_head = with_head(sample, sizes, wiring, x, width)
        notes += of_head
        if kind is None and _embeds_alone(sample, sizes, wiring, x):
            raise NotCalledError(
                f"{name} embeds each token by itself, without a map or an attention: it is a part of a model, which is "
                "what can be judged; or say what it is to be: --kind KIND"
            )
        told = kind or ("decoder" if width >= sizes.vocab_size and width != sizes.d_model else "encoder")
        if told == "decoder" and kind is None:
            told, why = _by_what_it_sees(sample, sizes, wiring, x, name)
            notes += why
        return Understood(told, wiring, what, (), tuple(notes))
    if len(shape) == 3 and shape[1] == 1 and what == "tokens" and shape[2] >= sizes.vocab_size:
        raise NotCalledError(
            f"{name} gives the logits of the last position alone ({list(shape)} for tokens [{B}, {T}]); say how it "
            f"gives those of every position: Subject(kind='decoder', build=..., forward=lambda m, tokens: ...)"
        )
    if len(shape) == 2 and shape == (B, T) and _follows_the_length(wiring, sample, x):
        notes.append("it gives a number for each position")
        return Understood(kind or "encoder", replace(wiring, pick=f"{where}.unsqueeze(-1)"), what, (), tuple(notes))
    if len(shape) == 2 and shape[0] == B:
        return Understood(kind or "classifier", wiring, what, (), tuple(notes))
    return None


def _follows_the_length(wiring: Wiring, sample: nn.Module, x: Tensor) -> bool:
    """Whether what is given has as many numbers for a sample as there are positions, at another length as well."""
    try:
        shorter = wiring.call(sample, x[:, :-1])
    except Exception:
        return False
    return isinstance(shorter, Tensor) and tuple(shorter.shape) == (B, T - 1)


def _embeds_alone(sample: nn.Module, sizes: DrawnConfig, wiring: Wiring, x: Tensor) -> bool:
    """Whether a model is tables and norms, and no output depends on the token at another position."""
    tables = {id(m.weight) for m in sample.modules() if isinstance(m, nn.Embedding)}
    if not tables or any(p.ndim == 2 and id(p) not in tables for p in sample.parameters()):
        return False
    seen = reached_by(lambda v: wiring.call(sample, v), x, (0, 1), sizes.vocab_size)
    return seen is not None and seen.ndim == 2 and int(seen.sum()) == 1


def _part_of_a_model(
    sample: nn.Module, sizes: DrawnConfig, wiring: Wiring, x: Tensor, name: str
) -> tuple[str, list[str]]:
    """Tell a norm and a feed-forward from a layer: by the name, or where no position sees another one."""
    if re.search(r"(?i)norm$", name):
        return "norm", [f"judged as a norm by its name, {name}"]
    if re.search(r"(?i)(feed_?forward|ffn|mlp|swiglu|geglu)$", name):
        return "feed_forward", [f"judged as a feed-forward by its name, {name}"]
    seen = reached_by(lambda v: wiring.call(sample, v), x, (0, 1), sizes.vocab_size)
    if seen is None or seen.ndim != 2 or int(seen.sum()) != 1:
        return "layer", []
    before, after = wiring.call(sample, x), wiring.call(sample, 3 * x)
    kind = "norm" if torch.allclose(before, after, atol=1e-3) else "feed_forward"
    return kind, [f"judged as a {kind}: no position sees another one; --kind layer if it is to attend"]


_MASKED = re.compile(r"\bmask_token\w*|\bmask_idx\b|\bmlm\w*|\bmasked_lm\w*|<mask>|\[MASK\]|== *[\w.]*\bMASK\b")
"""What the code of a masked language model speaks of."""

_CAUSAL = re.compile(r"(?i)causal|tril|triu|autoregress|generate|past|cache")
"""What the code of a model speaks of that must not see the future."""


def _foretells_hidden_tokens(module: nn.Module) -> str:
    """Return what says in the code of a model that it is one of masked tokens; "" where nothing does."""
    try:
        code = inspect.getsource(type(module))
    except (OSError, TypeError):
        return ""
    said = _MASKED.search(code)
    return said[0] if said and not _CAUSAL.search(code) else ""


def _by_what_it_sees(
    sample: nn.Module, sizes: DrawnConfig, wiring: Wiring, x: Tensor, name: str
) -> tuple[str, list[str]]:
    """Tell a decoder from an encoder with logits (BERT): by its name or code, where every output sees every input."""
    seen = reached_by(lambda v: wiring.call(sample, v), x, (0, T - 1), sizes.vocab_size)
    if seen is None or not bool(seen[0].all()):
        return "decoder", []
    if any(word in name.lower() for word in ("bert", "encoder", "mlm", "masked", "electra")):
        return "encoder", [f"judged as an encoder by its name, {name}: it gives logits and sees the future"]
    if said := _foretells_hidden_tokens(sample):
        return "encoder", [f"judged as an encoder by {said!r} in its code: it gives logits and sees the future"]
    return "decoder", ["judged as a decoder, since it gives logits over its vocabulary; --kind encoder if it is to see "
                       "the future"]  # fmt: skip
