"""Faults of what is taken from another's place: rows of a mask, words of a cache, axes, groups, biases, a skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.adapters.reference_objectives import build_decoder
from veriformer.properties.formulas.tokenizing.merging import looked_at
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.tokenization import BytePairEncoding, letters, split_words
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.tokenization import byte_pairs

_PART = 16
"""Queries that go through at once."""


class _Heads(nn.Module):
    """Attention from queries to keys, with what a fault may change handed in."""

    def __init__(self, c: DrawnConfig, rows: Callable[[int], int], bias: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.made_of = c.num_heads, (rows, bias)
        self.maps = nn.Parameter(torch.randn(3, c.d_model, c.d_model) * c.d_model**-0.5)
        self.biases = nn.Parameter(0.1 * torch.randn(3, c.d_model))
        self.out = nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        rows, bias = self.made_of
        given = (x, memory, memory)
        own = (self.biases[0], self.biases[1], bias(self.biases))
        q, k, v = (
            F.linear(y, w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y, w, b in zip(given, self.maps, own, strict=True)
        )
        made = []
        for begin in range(0, x.shape[1], _PART):
            part = q[:, :, begin : begin + _PART]
            scores = part @ k.mT * part.shape[-1] ** -0.5
            if mask is not None:
                first = rows(begin)
                seen = mask[:, first : first + part.shape[2]] if mask.shape[1] > 1 else mask
                scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
            made.append(scores.softmax(-1) @ v)
        y: Tensor = self.out(torch.cat(made, 2).transpose(1, 2).flatten(2))
        return y


def _itself(begin: int) -> int:
    return begin


def _of_values(biases: Tensor) -> Tensor:
    return biases[2]


@fault(
    "AT-rows-of-parts",
    "Queries go through in parts of 16, and each part has the rows of the mask that begin with the number of the part",
    killed_by=("attention.pairwise-mask",),
    cause="obeys row 1 of the pairwise mask, not row 16",
)
def rows_of_the_part() -> Subject:
    rows = put(lambda begin: begin // _PART, instead_of=_itself)

    def forward(m: _Heads, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[None].expand(len(x), *attention_mask.shape)
        return m(x, x, attention_mask)  # type: ignore[no-any-return]

    return Subject(
        kind="self_attention", build=lambda c: _Heads(c, rows, _of_values), forward=forward, mask_forms=("pairwise",),
        declares={"causal": False, "positions": "none"},
    )  # fmt: skip


@fault(
    "HD-bias-of-keys",
    "Values are projected with the bias of the keys",
    killed_by=("attention.definition",),
    cause="takes the keys' bias",
)
def bias_of_the_keys() -> Subject:
    bias = put(lambda biases: biases[1], instead_of=_of_values)

    def parts(m: _Heads) -> dict[str, Tensor]:
        matrices = {f"{name}_bias": b for name, b in zip("qkv", m.biases.data, strict=True)}
        matrices |= dict(zip("qkv", m.maps.data, strict=True))
        return {**matrices, "o": m.out.weight.data, "o_bias": m.out.bias.data}

    return Subject(
        kind="cross_attention", build=lambda c: _Heads(c, _itself, bias), projections=parts,
        forward=lambda m, x, memory, memory_mask=None: m(
            x, memory, None if memory_mask is None else memory_mask[:, None]
        ),
        declares={"positions": "none"},
    )  # fmt: skip


@fault(
    "TK-cache-of-the-class",
    "The ids of words are kept on the class: a second tokenizer gives those of the first",
    killed_by=("tokenizer.bpe-merges",),
    cause="is shared by all tokenizers",
)
def cache_of_the_class() -> Subject:
    kept: dict[str, list[int]] = {}
    own: Callable[[Any], dict[str, list[int]]] = put(
        lambda model: kept, instead_of=lambda model: model.__dict__.setdefault("kept", {})
    )

    def forward(model: Any, text: str) -> list[int]:
        known = own(model)
        if text not in known:
            known[text] = model.encode(text)
        return list(known[text])

    return byte_pairs(forward=forward)


@fault(
    "SM-axes-exchanged",
    "The axis that was moved to the end for the softmax is exchanged with the last one, not moved back",
    killed_by=("softmax.axis",),
    cause="an axis that was moved to the end is not moved back",
)
def axes_are_exchanged() -> Subject:
    back: Callable[[Tensor, int], Tensor] = put(
        lambda w, dim: w.transpose(-1, dim), instead_of=lambda w, dim: w.movedim(-1, dim)
    )
    return Subject(
        kind="softmax", forward=lambda m, x, dim=-1: back(x.movedim(dim, -1).softmax(-1), dim),
        declares={"empty_row": "nan"},
    )  # fmt: skip


@fault(
    "OP-groups-of-layers",
    "Parameters are grouped by their layer alone, and a group decays as the first of them should",
    killed_by=("schedule.decay-groups",),
    cause="groups are formed by something else",
)
def groups_of_layers() -> Subject:
    key: Callable[[str, int], Any] = put(lambda layer, ndim: layer, instead_of=lambda layer, ndim: (layer, ndim > 1))

    def forward(model: nn.Module) -> Any:
        groups: dict[Any, dict[str, Any]] = {}
        for name, p in model.named_parameters():
            layer = name.split(".")[2] if name.startswith("stack.layers.") else name.split(".")[0]
            group = groups.setdefault(key(layer, p.ndim), {"params": [], "weight_decay": 0.1 * (p.ndim > 1)})
            group["params"].append(p)
        return list(groups.values())

    return Subject(kind="parameter_groups", build=build_decoder, forward=forward)


class _Written(nn.Module):
    """A pre-norm layer whose norms are functions of parameters of its own."""

    def __init__(self, c: DrawnConfig, skip: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.skip = skip
        self.attend = nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.gains = nn.ParameterList(torch.ones(c.d_model) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, two = (partial_norm(g) for g in self.gains)
        y = one(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        y = two(x)
        return self.skip(x, y) + self.down(F.gelu(self.up(y)))


def partial_norm(gain: Tensor) -> Callable[[Tensor], Tensor]:
    """Return layer normalisation with a gain."""
    return lambda x: F.layer_norm(x, gain.shape) * gain


@fault(
    "RS-skip-of-the-normed",
    "The skip around the feed-forward network begins behind the norm, which is a function and no module",
    killed_by=("residual.identity",),
    cause="a skip starts behind a norm|in place of `return self.skip(x, y)",
)
def skip_of_the_normed() -> Subject:
    skip = put(lambda x, y: y, instead_of=lambda x, y: x)
    return Subject(
        kind="layer", build=lambda c: _Written(c, skip), forward=lambda m, x: m(x),
        declares={"causal": False, "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    )  # fmt: skip


@fault(
    "NM-lanes-of-a-power",
    "Rows are filled up with zeros to the next power of two, and these count in the variance behind the mean",
    killed_by=("norm.definition",),
    cause="to the next power of two, and in the variance these are not hidden",
)
def lanes_of_a_power() -> Subject:
    hidden: Callable[[Tensor, int], Tensor] = put(
        lambda y, width: y, instead_of=lambda y, width: torch.cat([y[..., :width], 0 * y[..., width:]], -1)
    )

    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            width = x.shape[-1]
            row = F.pad(x, (0, (1 << (width - 1).bit_length()) - width))
            row = hidden(row - row.sum(-1, keepdim=True) / width, width)
            y = row * (row.square().sum(-1, keepdim=True) / width + 1e-5).rsqrt()
            return y[..., :width] * self.weight + self.bias

    return Subject(
        kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x),
        declares={"norm": "layer", "half_precision": False},
    )  # fmt: skip


@fault(
    "TK-right-neighbour",
    "After a merge the pair with the left neighbour is not looked at again",
    killed_by=("tokenizer.bpe-merges",),
    cause="only the pair with the right neighbour is looked at",
)
def right_neighbour_alone() -> Subject:
    def forward(model: BytePairEncoding, text: str) -> list[int]:
        if any(special in text for special in model.specials):
            return model.encode(text)
        ranks: dict[tuple[str, ...], int] = {pair: n for n, pair in enumerate(model.merges)}
        words = (looked_at((0,))(list(letters(word)), ranks) for word in split_words(text))
        return [model.vocabulary[piece] for word in words for piece in word]

    return byte_pairs(forward=forward)
