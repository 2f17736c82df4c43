"""Padding that a model takes from its tokens: which id pads, and how a mask becomes tokens of that id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig

if TYPE_CHECKING:
    from veriformer.properties.adapters.unknown.understanding import Understood

_AT = 1
Run = Callable[[Tensor], Tensor]


def by_token_of_one(
    found: Understood, sample: nn.Module, sizes: DrawnConfig, padding_id: str, x: Tensor
) -> Understood | None:
    """Return the call of a model of one sequence that takes its padding from the tokens; None where it does not.

    Args:
        found: how it is called.
        sample: in eval mode.
        sizes: of the sample.
        padding_id: source of the id that the constructor was told, where it takes one.
        x: tokens `[B, T]` that it takes; else embeddings.
    """
    if found.inputs != "tokens":
        return None
    run: Run = lambda v: found.wiring.call(sample, v)  # noqa: E731
    for token, where in _candidates(sample, sizes):
        is_told = token == sizes.vocab_size and bool(padding_id)
        if is_told != bool(padding_id) or not (where or token == 0):
            continue
        is_table = where.endswith("padding_idx") and token == 0
        if not is_table and not hides(run, sample, x, token, is_source=False):
            continue
        before, note = _written(("x",), ("attention_mask",), token, where, is_told=is_told)
        wiring = replace(found.wiring, before=(*before, *found.wiring.before), masks=("attention_mask",))
        return replace(found, wiring=wiring, mask_forms=("padding",), notes=(*found.notes, note),
                       counts_from_one=not is_told)  # fmt: skip
    return None


def by_tokens_of_two(
    found: Understood, sample: nn.Module, sizes: DrawnConfig, padding_id: str, x: Tensor, y: Tensor
) -> Understood | None:
    """Return the call of a model of a source `[B, S]` and a target `[B, T]` likewise, with a mask of the source.

    Where either of the two is padded by an id, what stands for the mask of the source is that id: a model that hides
    the one and forgets the other is found out then.
    """
    if found.inputs != "tokens" or found.wiring.masks:
        return None
    for token, where in _candidates(sample, sizes):
        is_told = token == sizes.vocab_size and bool(padding_id)
        if is_told != bool(padding_id) or not (where or token == 0):
            continue
        of_source: Run = lambda v: found.wiring.call(sample, v, y)  # noqa: E731
        of_target: Run = lambda v: found.wiring.call(sample, x, v)  # noqa: E731
        by_source = hides(of_source, sample, x, token, is_source=True)
        if not by_source and not hides(of_target, sample, y, token, is_source=False):
            continue
        before, note = _written(("source", "target"), ("source_mask",), token, where, is_told=is_told)
        wiring = replace(found.wiring, before=(*before, *found.wiring.before), masks=("source_mask",))
        notes = (*found.notes, note, *([] if by_source else ["that of the source by that of the target alone"]))
        return replace(found, wiring=wiring, mask_forms=("padding",), notes=notes, counts_from_one=not is_told)
    return None


def _candidates(sample: nn.Module, sizes: DrawnConfig) -> Iterator[tuple[int, str]]:
    """Yield the ids that may pad, each with the source that reads it off the model, what the model names first."""
    seen: set[int] = set()
    for token, where in [*_named(sample), (0, "")]:
        if token not in seen and 0 <= token <= sizes.vocab_size:
            seen.add(token)
            yield token, where


def _named(sample: nn.Module) -> Iterator[tuple[int, str]]:
    for path, part in sample.named_modules():
        if (
            isinstance(part, nn.Embedding)
            and part.padding_idx is not None
            and not any(w.isdigit() for w in path.split("."))
        ):
            yield part.padding_idx, f"model.{path}.padding_idx"
    for holder in ("", "config", "cfg", "args"):
        owner = sample if not holder else getattr(sample, holder, None)
        for name, value in getattr(owner, "__dict__", {}).items():
            if "pad" in name.lower() and type(value) is int:
                yield value, f"model.{holder}.{name}".replace("..", ".")


def _written(
    inputs: tuple[str, ...], masks: tuple[str, ...], token: int, where: str, *, is_told: bool
) -> tuple[tuple[str, ...], str]:
    """Return the lines that make tokens of masks, and what they say."""
    if is_told:
        lines, pad = [], where
        note = f"token {where} is padding: it is never drawn, and what a mask hides becomes it"
    elif token == 0:
        lines, pad = [f"{x} = {x} + 1" for x in inputs], "0"
        note = "token 0 is padding: tokens are counted from 1, and what a mask hides becomes 0"
    else:
        lines, pad = [f"{x} = {x} + ({x} >= {where})" for x in inputs], where
        note = f"token {token} is padding: no other becomes it, and what a mask hides does"
    for x, mask in zip(inputs, masks, strict=False):
        lines += [f"if {mask} is not None:", f"    {x} = {x}.masked_fill(~{mask}, {pad})"]
    return tuple(lines), note


def hides(run: Run, sample: nn.Module, x: Tensor, token: int, *, is_source: bool) -> bool:
    """Whether the embedding of a token reaches no other position, and that of another token does.

    Args:
        run: gives the output for tokens.
        sample: the model; hooks are put on its tables.
        x: tokens `[B, T]`, of a length that nothing else has that is embedded.
        token: the id.
        is_source: whether the output has positions of another sequence, all of which are looked at.
    """
    seen: list[bool] = []
    other = int(x.flatten()[0]) if int(x.flatten()[0]) != token else int(x.flatten()[0]) + 1
    for one in (token, other):
        given = x.clone()
        given[:, _AT] = one
        outputs = []
        for amount in (0.0, 1.0):

            def moved(module: nn.Module, args: tuple[Any, ...], output: Any, amount: float = amount) -> Any:
                if isinstance(output, Tensor) and output.ndim == 3 and output.shape[:2] == x.shape:
                    output = output.clone()
                    output[:, _AT] += amount * torch.linspace(-1, 1, output.shape[-1])
                elif isinstance(output, Tensor) and output.ndim == 3 and output.shape[:2] == x.shape[::-1]:
                    output = output.clone()
                    output[_AT] += amount * torch.linspace(-1, 1, output.shape[-1])
                return output

            tables = [m for m in sample.modules() if isinstance(m, nn.Embedding)]
            hooks = [m.register_forward_hook(moved) for m in tables]
            try:
                outputs.append(run(given))
            except Exception:
                return False
            finally:
                for hook in hooks:
                    hook.remove()
        if outputs[0].ndim not in (2, 3):
            return False
        apart = (outputs[1] - outputs[0]).abs().amax(-1)
        if apart.ndim == 2 and not is_source:
            apart[:, _AT] = 0
        seen.append(bool((apart > 1e-5 * outputs[0].abs().max()).any()))
    return seen == [False, True]
