"""Probes of how a module is built: where positions enter, where the norms stand and which they are, what is tied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.anatomy.entering import SINES_SHOW, is_made_of_sines
from veriformer.properties.anatomy.norms import is_norm
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.definitions.sinusoids import closed_form
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream
from veriformer.properties.probes.findings import Finding, Question, a_case
from veriformer.properties.probes.module_parts import layer_lists, silence

_STACKS = ("encoder", "decoder", "classifier")
LENGTH = 6


def where_positions_enter(bench: Workbench) -> Iterator[Finding]:
    """Feed one token at every position: what the first layer gets then differs by the positions alone."""
    if bench.subject.kind not in (*_STACKS, "encoder_decoder") or not bench.subject.takes_tokens:
        return
    case = a_case(bench)
    built = case.bench.pool.fresh(bench.configs[0], torch.float32)
    if not isinstance(built.module, nn.Module):
        return
    added = _entering(case, built, LENGTH)
    if added is None:
        return
    steps = (added - added[:1]).detach().double().cpu()
    if not bool((steps.abs() > 1e-6 * size_of(added)).any()):
        yield Finding(
            "positions enter", "not at the embedding", "one token at every position enters the first layer alike",
            is_fact=False, told=False,
        )  # fmt: skip
        return
    kind, how = "added", "one token enters the first layer differently at every position"
    for layout in ("interleaved", "halves"):
        angles = closed_form(LENGTH, steps.shape[1], 10000.0, layout)
        if worst_difference(steps, angles - angles[:1]).error < 1e-4:
            kind, how = "sinusoidal", f"what is added is the sinusoidal table, {layout}"
    longest = min(bench.configs[0].max_len, bench.subject.longest or SINES_SHOW)
    if kind == "added" and longest >= SINES_SHOW:
        whole = _entering(case, built, SINES_SHOW)
        if whole is not None and is_made_of_sines(whole):
            kind, how = "sinusoidal", "what is added is made of sines and cosines"
    if kind == "added" and any(
        m.num_embeddings != bench.configs[0].vocab_size and m.embedding_dim == steps.shape[1]
        for m in built.module.modules()
        if isinstance(m, nn.Embedding)
    ):
        kind, how = "learned", "what is added comes from a table of its own"
    if kind != "added":
        yield Finding("positions", kind, how)
    yield Finding("positions enter", "at the embedding", how, is_fact=False, told=False)


def _entering(case: Case, built: Built, length: int) -> Tensor | None:
    """Return `[T, D]`, what enters the first layer for one token at every position; of two sequences, of the source."""
    tokens = torch.ones(1, length, dtype=torch.long, device=case.bench.device)
    given = (tokens, tokens) if case.subject.kind == "encoder_decoder" else (tokens,)
    entering = first_input(built.module, built.config.d_model, lambda: case.call(built, *given))
    return None if entering is None or entering.shape[1] < length else entering[0, -length:]


def first_input(model: nn.Module, width: int, run: Callable[[], object]) -> Tensor | None:
    """Return what the first norm or linear map of a model gets, `[B, T, D]`; None if none gets such a tensor.

    Args:
        model: hooked while it runs.
        width: D.
        run: calls it.
    """
    seen = taken_in(model, width, run)
    return seen[0] if seen else None


def first_to_change(
    model: nn.Module, width: int, run: Callable[[], object], otherwise: Callable[[], object]
) -> Tensor | None:
    """Return the first thing that a norm or linear map gets in one run and not in another, as it is in the one.

    Args:
        model: hooked while it runs.
        width: D.
        run: calls it.
        otherwise: calls it on other inputs of one side.
    """
    for one, other in zip(taken_in(model, width, run), taken_in(model, width, otherwise), strict=False):
        if one.shape == other.shape and not torch.equal(one, other):
            return one
    return None


def taken_in(model: nn.Module, width: int, run: Callable[[], object]) -> list[Tensor]:
    """Return what the norms and linear maps of a model get, `[B, T, D]` each, in the order of their calls."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.ndim == 3 and given.shape[-1] == width:
            seen.append(given.detach().clone())

    takers = [m for m in model.modules() if is_norm(m) or isinstance(m, nn.Linear | nn.MultiheadAttention)]
    with hooked(part.register_forward_pre_hook(note) for part in takers):
        run()
    return seen


_QUESTION = Question(
    "anatomy.residual",
    "a layer begins with its norm, as pre-LN does, and adds to what that gave, not to what the layer was given: is the "
    "residual taken behind the norm by mistake?",
    "norm_placement='post'",
)


def place_of_norm(bench: Workbench) -> Iterator[Finding]:
    """Set all parameters outside the norms to zero on a copy: pre-LN passes its input on, post-LN normalises it."""
    subject = bench.subject
    if subject.kind not in ("layer", *_STACKS) or subject.fact("cross_attention"):
        return
    case = a_case(bench)
    built = case.bench.pool.fresh(bench.configs[0], torch.float32, raw=True)
    if not isinstance(built.module, nn.Module):
        return
    layer = built.module
    if subject.kind != "layer":
        lists = layer_lists(built.module, built.config)
        if not lists:
            return
        layer = lists[0][0]
    if not any(is_norm(part) for part in layer.modules()) or not silence(layer):
        return
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given = next((a for a in args if isinstance(a, Tensor)), None)
        made = output[0] if isinstance(output, tuple) else output
        if given is not None and isinstance(made, Tensor) and made.shape == given.shape:
            seen.append((given.detach().double(), made.detach().double()))

    def unlike(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give the layer what no norm gives: embeddings that were just normalised would pass through another one."""
        return tuple(3 * a + 0.5 if i == 0 and isinstance(a, Tensor) else a for i, a in enumerate(args))

    hooks, began = [layer.register_forward_pre_hook(unlike), layer.register_forward_hook(note)], list[nn.Module]()
    hooks += [m.register_forward_pre_hook(lambda m, args: began.append(m)) for m in layer.modules()
              if m is not layer and any(True for _ in m.parameters(recurse=False))]  # fmt: skip
    with hooked(hooks):
        stream = Stream(case, built)
        stream(stream.draw(2, 4))
    if not seen:
        return
    given, made = seen[0]
    if worst_difference(made, given).error <= 1e-5 * size_of(given):
        yield Finding("norm_placement", "pre", "with silent sublayers a layer gives its input")
        yield Finding("residual", True, "with silent sublayers a layer gives its input", told=False)
    elif layer is built.module and began and _is_behind(began[-1], layer_lists(built.module, built.config)):
        return  # a stack whose last norm is behind its layers: of where theirs stand nothing is seen
    elif abs(size_of(made) - 1) < 1e-2 and _correlates(made, given):
        first, last = (is_norm(began[n]) if began else False for n in (0, -1))
        seen_so = "with silent sublayers a layer gives its normalised input"
        if not (first and last):  # with norms at both ends, as a Conformer's block, it is neither of the two
            yield Finding("norm_placement", "post", seen_so, asks=_QUESTION if first else None)
        yield Finding("residual", True, seen_so, told=False)
    elif not bool(made.any()):
        yield Finding("residual", False, "with silent sublayers nothing is left", is_fact=False, told=False)


def _is_behind(part: nn.Module, lists: Sequence[Sequence[nn.Module]]) -> bool:
    """Whether a norm is none of those inside the layers of a stack; without layers there is no behind."""
    inside = {id(m) for layers in lists for layer in layers for m in layer.modules()}
    return bool(inside) and is_norm(part) and id(part) not in inside


def _correlates(made: Tensor, given: Tensor) -> bool:
    centred = given - given.mean(-1, keepdim=True)
    return any(
        float(torch.cosine_similarity(made.flatten(), x.flatten(), dim=0)) > 0.9
        for x in (given / given.norm(dim=-1, keepdim=True), centred / centred.norm(dim=-1, keepdim=True))
    )


def kind_of_norm(bench: Workbench) -> Iterator[Finding]:
    """Call the norms found in a module: LayerNorm ignores a constant added to all channels, RMSNorm does not."""
    if bench.subject.kind not in ("norm", "layer", *_STACKS, "encoder_decoder"):
        return
    built = bench.pool.fresh(bench.configs[0], torch.float32, raw=True)
    if not isinstance(built.module, nn.Module):
        return
    norms = [built.module] if bench.subject.kind == "norm" else [m for m in built.module.modules() if is_norm(m)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, bench.configs[0].d_model, generator=generator).to(bench.device)
    kinds = set()
    for norm in norms:
        if not list(norm.parameters(recurse=False)) and bench.subject.kind != "norm":
            continue
        with torch.no_grad():
            plain, moved, larger = (bench.call(norm, value) for value in (x, x + 1, 3 * x))
        if worst_difference(larger, plain).error > 1e-2:
            kinds.add("other")
        else:
            kinds.add("layer" if worst_difference(moved, plain).error < 1e-3 else "rms")
    if len(kinds) == 1:
        found = kinds.pop()
        words = {
            "layer": "a constant added to all channels does not change what it gives",
            "rms": "it takes away the size of a token and not its mean",
            "other": "the size of a token is not taken away",
        }
        yield Finding("norm", found, words[found])


def tied_embeddings(bench: Workbench) -> Iterator[Finding]:
    """Look for one parameter that is both a token embedding and the weight of a linear map."""
    if bench.subject.kind not in ("encoder", "decoder", "encoder_decoder"):
        return
    built = bench.pool.get(bench.configs[0], torch.float32)
    if not isinstance(built.module, nn.Module):
        return
    tables = {id(m.weight) for m in built.module.modules() if isinstance(m, nn.Embedding)}
    maps = [m for m in built.module.modules() if isinstance(m, nn.Linear)]
    if any(id(m.weight) in tables for m in maps) or any(id(p) in tables for p in _own(built.module)):
        yield Finding("tied", True, "one parameter embeds tokens and projects to the vocabulary")
    elif all(_has_head(bench.pool.get(c, torch.float32)) for c in bench.configs[:2]) or _maps_back(built, tables):
        yield Finding(
            "tied", False, "embedding and output projection are two parameters", told=False, asks=_copied(bench)
        )


def _has_head(built: Built) -> bool:
    """Whether a map gives as many channels as there are tokens: at one size another width may be that by chance."""
    maps = (m for m in built.module.modules() if isinstance(m, nn.Linear))
    return any(m.out_features in _rows(built.config.vocab_size) for m in maps)


def _rows(vocab_size: int) -> tuple[int, int]:
    """Return how many rows a table may have: one more where token 0 is padding and is never drawn."""
    return vocab_size, vocab_size + 1


def _maps_back(built: Built, tables: set[int]) -> bool:
    """Whether a parameter that no module of torch holds has the shape of an embedding: a head without nn.Linear."""
    rows = _rows(built.config.vocab_size)
    shapes = {
        m.weight.shape for m in built.module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings in rows
    }
    return any(p.shape in shapes and id(p) not in tables for p in _own(built.module))


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that modules hold which are none of torch's, and no tables either."""
    parts = (
        m for m in module.modules() if not type(m).__module__.startswith("torch.") and not isinstance(m, nn.Embedding)
    )
    return [p for m in parts for p in m.parameters(recurse=False)]


def _copied(bench: Workbench) -> Question | None:
    """Ask where the two hold the same numbers when built: nobody draws those twice, and training parts them."""
    raw = bench.pool.fresh(bench.configs[0], torch.float32, raw=True)
    tables = [(n, m.weight) for n, m in raw.module.named_modules() if isinstance(m, nn.Embedding)]
    for (table, one), (head, other) in itertools.product(tables, raw.module.named_parameters()):
        if one is not other and one.shape == other.shape and torch.equal(one, other) and one.unique().numel() > 1:
            how = "share their memory (.data)" if one.data_ptr() == other.data_ptr() else "hold the same numbers"
            text = f"{table}.weight and {head} {how} when built and are two parameters: are they meant to be one?"
            return Question("parameters.tied", text, "tied=False")
    return None
