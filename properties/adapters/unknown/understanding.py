"""How a model of one sort is called: what every way of finding that out gives, and what it tries first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.constructing.size_names import is_padding_id
from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.unused import head_left_to_the_caller
from veriformer.properties.adapters.unknown.wiring import Wiring, reached_by
from veriformer.properties.subject.sizes import DrawnConfig

B, T = 3, 5
TWO = ("encoder_decoder", "cross_attention")
STACKS = ("encoder", "decoder", "encoder_decoder", "classifier")


class NotCalledError(TypeError):
    """A model cannot be called as anything known; says what came of it."""


@dataclass(frozen=True)
class Understood:
    """How a model is called.

    Attributes:
        kind: of subject.
        wiring: the call.
        inputs: "tokens" or "embeddings" for the kinds that take either; else None.
        mask_forms: of `Subject`.
        notes: what was guessed or found out, one sentence each.
        part: source of the part of the model that is judged, after its name; empty for all of it.
        image: shape `[C, H, W]` of the images that the whole takes, where a part of it is judged.
        enters: path of the module that the patches of an image enter.
        counts_from_one: whether token 0 is padding, so that its vocabulary needs a row more than what is drawn.
        one_longer: whether it is given a token more than what is drawn, so that its longest is one more.
        declares: facts that follow from what is judged.
        own_sizes: sizes that it is called with alone: its one length, and the channels of that.
    """

    kind: str
    wiring: Wiring
    inputs: str | None
    mask_forms: tuple[str, ...]
    notes: tuple[str, ...]
    part: str = ""
    image: tuple[int, int, int] | None = None
    enters: str = ""
    counts_from_one: bool = False
    one_longer: bool = False
    declares: Mapping[str, Any] = field(default_factory=dict)
    own_sizes: Mapping[str, int] = field(default_factory=dict)


def embeds(sample: nn.Module) -> bool:
    """Whether a model has a table of embeddings, and so takes tokens."""
    return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in sample.modules())


def tokens_of(size: int, batch: int, length: int) -> Tensor:
    """Return tokens 1 .. size - 1: the first one may be padding."""
    return torch.randint(1, max(size, 2), (batch, length), generator=torch.Generator().manual_seed(0))


def basis(arguments: Sequence[Argument], x: str, sample: nn.Module) -> dict[str, str]:
    """Return what the first argument and the other required ones are given, as far as their names tell."""
    length = f"{x}.shape[1]"
    given: dict[str, str] = {"*first": x}
    for a in arguments[1:]:
        if not a.is_required:
            continue
        if is_padding_id(a.name):
            given[a.name] = "-1"  # which is no token: nothing is padding
        elif a.role == "start":
            given[a.name] = "0"
        elif a.role == "positions":
            given[a.name] = f"torch.arange({length}, device={x}.device)"
        elif a.role == "segments":
            few = [m for m in sample.modules() if isinstance(m, nn.Embedding) and m.num_embeddings < 5]
            is_zero_none = any(m.padding_idx == 0 for m in few)  # segment 0 is that of padding then
            given[a.name] = f"torch.{'ones' if is_zero_none else 'zeros'}_like({x})"
        elif a.role in ("mask", "memory", "cache"):
            given[a.name] = "None"
        elif a.role == "labels":
            given[a.name] = f"{x}.contiguous()"
    return given


def unknown(arguments: Sequence[Argument], given: dict[str, str]) -> list[str]:
    """Return the names of required arguments that nothing is given for."""
    return [a.name for a in arguments[1:] if a.is_required and a.name not in given]


def with_head(
    sample: nn.Module, sizes: DrawnConfig, wiring: Wiring, x: Tensor, width: int, *more: Tensor
) -> tuple[Wiring, int, list[str]]:
    """Return the call with the output layer that the model leaves to its caller, if it has one."""
    if width != sizes.d_model:
        return wiring, width, []
    output = wiring.call(sample, x, *more)
    head = head_left_to_the_caller(sample, lambda: wiring.call(sample, x, *more), output, sizes.vocab_size)
    if head is None:
        return wiring, width, []
    note = f"its {head} is applied to what it gives, as its caller would"
    return replace(wiring, around=f"model.{head}"), sizes.vocab_size, [note]


def time_first(sample: nn.Module, sizes: DrawnConfig, wiring: Wiring, x: Tensor) -> bool:
    """Whether what changes with one cell of the input lies along the first axis rather than along the second."""
    for at in ((0, 0), (1, 1)):
        try:
            seen = reached_by(lambda v: wiring.call(sample, v), x, at, sizes.vocab_size)
        except Exception:
            return False
        if seen is None or seen.ndim != 2 or seen.shape != x.shape[:2]:
            return False
        along, across = seen[:, at[1]].sum(), seen[at[0]].sum()
        if seen.sum() == along > 1 and across == 1:
            return True
        if seen.sum() == across > 1:
            return False
    return False


def first_axis_is_time(wiring: Wiring) -> Wiring:
    """Return the call with its sequences, and what it gives, turned."""
    turned = {n: _turned(v, wiring.inputs) for n, v in wiring.given.items()}
    return replace(wiring, given=turned, pick=f"{wiring.pick}.transpose(0, 1)")


def _turned(value: str, inputs: Sequence[str]) -> str:
    return f"{value}.transpose(0, 1)" if value in inputs else value


def given_as(what: str, sizes: DrawnConfig) -> str:
    """Return the shape of what was given, in words."""
    return f"[{B}, {T}]" if what == "tokens" else f"[{B}, {T}, {sizes.d_model}]"


def shape_of(output: Any) -> str:
    """Return the shape of an output, in words."""
    return f"shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
