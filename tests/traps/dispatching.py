"""Right parts that look like the faults of bare models: experts called in turn, norms of all heads, rows that end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants.mixtures import Dispatched, Layer
from veriformer.tests.mutants.norm_axes import Attending, Block
from veriformer.tests.mutants.translating import translator
from veriformer.tests.traps import trap


@trap("T-experts-in-turn", "Each expert is called on its tokens alone, and what it gives is added at their places")
def experts_in_turn() -> Subject:
    class Added(Dispatched):
        def gather(self, out: Tensor, rows: Tensor, part: Tensor) -> Tensor:
            one_hot = torch.zeros(len(out), len(rows), dtype=part.dtype)
            one_hot[rows, torch.arange(len(rows))] = 1.0  # each token is there once for one expert
            return out + one_hot @ part

    return Subject(
        kind="layer", build=lambda c: Layer(c, Added), forward=lambda m, x: m(x), mask_forms=(),
        declares={"norm_placement": "pre", "norm": "layer"},
    )  # fmt: skip


@trap("T-norm-of-all-heads", "Queries and keys are normalised over the channels of all heads at once")
def norm_of_all_heads() -> Subject:
    class Whole(Attending):
        def unit(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean((-1, -2), keepdim=True) + 1e-6)

    return Subject(
        kind="layer", build=lambda c: Block(c, Whole), forward=lambda m, x: m(x), mask_forms=(),
        declares={"norm": "layer", "norm_placement": "pre", "query_key_norm": True},
    )  # fmt: skip


@trap("T-rows-that-end", "Rows of a batch that have ended are filled up with padding, which is not the best token")
def rows_that_end() -> Subject:
    return translator()


class Ones(nn.Module):
    """A layer whose mask of ones is made in float16, which holds ones and zeros exactly."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        shown = torch.ones(x.shape[1], x.shape[1], dtype=torch.float16, device=x.device).tril()
        hidden = (1.0 - shown.to(x.dtype)) * torch.finfo(x.dtype).min
        h = self.norm(x)
        y: Tensor = x + self.attention(h, h, h, attn_mask=hidden, need_weights=False)[0]
        return y


@trap("T-half-mask", "A mask of ones and zeros is kept in float16 inside a model of float32")
def half_mask() -> Subject:
    return Subject(
        kind="layer", build=lambda c: Ones(c.d_model, c.num_heads), forward=lambda m, x: m(x), mask_forms=(),
        declares={"norm": "layer", "norm_placement": "pre", "causal": True},
    )  # fmt: skip
