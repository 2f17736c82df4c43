"""Faults of what is left over: blocks of a window, rows of a packed tile, channels of an odd head, padding alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put, put_class
from veriformer.tests.mutants.parts import CausalLayer, SelfAttention

_PAGE, _WINDOW = 8, 10


def _pages_behind(window: int) -> int:
    """Return how many pages before its own hold keys of a query's window, wherever in its page it stands."""
    return -(-(window - 1) // _PAGE)


@fault(
    "reach-window-pages",
    "A window of ten keys is looked for in the page of a query and one more, where its first queries need two",
    killed_by=("causality.window",),
    cause="what is seen depends on where in a block of keys a query stands",
)
def pages_too_few() -> Subject:
    behind = put(lambda window: window // _PAGE, instead_of=_pages_behind)

    class Paged(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            at = torch.arange(length)
            near = super().allowed(length).triu(1 - _WINDOW)
            return near & (at[None] // _PAGE >= at[:, None] // _PAGE - behind(_WINDOW))

    return Subject(
        kind="layer", build=Paged, forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": True, "positions": "none", "window": _WINDOW},
    )  # fmt: skip


def _query_of(row: Tensor, group: int, tile: int) -> Tensor:
    """Return which query a packed row is, of `group` heads a query."""
    return row // group


@fault(
    "tiles-packed-rows",
    "Heads of one key-value head are packed as rows, whose queries are counted anew in every tile of 32 rows",
    killed_by=("attention.tiles",),
    cause="right up to",
)
def rows_of_packed_heads() -> Subject:
    counted = put(lambda row, group, tile: row // tile * (tile // group) + row % tile // group, instead_of=_query_of)

    def packed(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, causal: bool) -> Tensor:
        group = q.shape[1] // k.shape[1]
        rows = q.unflatten(1, (-1, group)).transpose(2, 3).flatten(2, 3)
        scores = rows @ k.mT * q.shape[-1] ** -0.5
        at = torch.arange(rows.shape[2])
        if causal:
            hidden = torch.arange(k.shape[2])[None] > counted(at, group, 32)[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        if attention_mask is not None:
            full = attention_mask.expand(len(q), -1, q.shape[2], -1)[:, :1]
            scores = scores.masked_fill(~full[:, :, at // group], -torch.inf)
        out = scores.softmax(-1).nan_to_num(0.0) @ v
        return out.unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)

    return Subject(
        kind="attention", name="packed heads",
        forward=lambda m, q, k, v, attention_mask=None, causal=False: packed(q, k, v, attention_mask, causal),
        declares={"grouped_queries": True, "causal_alignment": "top-left", "empty_row": "zeros"},
    )  # fmt: skip


class _Local(nn.Module):
    """Two layers in which a token sees six to either side, and no padding: hidden scores are moved down."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SelfAttention(config) for _ in range(2))

    def down(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).min

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        allow = ((at[:, None] - at[None]).abs() <= 6)[None, None]
        if attention_mask is not None:
            allow = allow & attention_mask[:, None, None, :]
        bias = (~allow).to(x.dtype) * self.down(x.dtype)
        for part in self.layers:
            weights = (part.scores(x) + bias).softmax(dim=-1)
            x = x + part.o(part.merge(weights @ part.split(part.values(x))))
        return x


@fault(
    "half-window-of-padding",
    "Hidden scores are moved by -3e38, -inf in float16: a token whose window is padding alone is NaN, and in the next "
    "layer every one beside it",
    killed_by=("padding.content-irrelevant",),
    cause="a query that sees padding alone has no finite score",
)
def window_of_padding() -> Subject:
    class Wrong(_Local):
        def down(self, dtype: torch.dtype) -> float:
            return -3e38

    return Subject(
        kind="layer", build=put_class(Wrong), forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "none", "padding_side": "both", "stacked": False, "sparse": True},
    )  # fmt: skip


class _Filled(nn.Module):
    """A pre-LN block whose fused kernel wants heads of a multiple of four channels, and gets zeros for the rest."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.heads, self.width = config.num_heads, config.d_head
        self.norm = nn.LayerNorm(config.d_model)
        self.qkv, self.out = nn.Linear(config.d_model, 3 * config.d_model), nn.Linear(config.d_model, config.d_model)

    def scale(self, filled: int) -> float:
        return self.width**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.width)).permute(2, 0, 3, 1, 4)
        q, k, v = (functional.pad(y, (0, -self.width % 4)) for y in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, scale=self.scale(q.shape[-1]))
        return x + self.out(out[..., : self.width].transpose(1, 2).flatten(2))


@fault(
    "reach-filled-heads",
    "Heads whose channels are filled up to a multiple of four are scaled by the width that comes out",
    killed_by=("anatomy.scale",),
    cause="that of heads filled up with zeros",
)
def scale_of_filled_heads() -> Subject:
    class Wrong(_Filled):
        def scale(self, filled: int) -> float:
            return filled**-0.5

    return Subject(
        kind="layer", build=put_class(Wrong), forward=lambda m, x: m(x),
        declares={"causal": False, "positions": "none", "norm_placement": "pre", "norm": "layer"},
    )  # fmt: skip
