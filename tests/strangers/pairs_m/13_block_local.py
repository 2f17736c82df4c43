"""zoo/PR 217: block-local encoder (the local part of BigBird). Sequences are cut into blocks of four; a query sees its
own block and the one on either side."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject

WHAT = "If no mask is given, the zeros that fill up the blocks and stand beyond both ends are not masked."
CAUSE = (
    "The validity of keys is only built when the caller passes an attention mask: without one the zero keys that pad "
    "the sequence to whole blocks (and the empty blocks left and right of it) take part in the softmax with score 0 "
    "and value 0, so no mask is not the same as a mask of ones."
)
BLOCK = 4


def neighbours(x: Tensor) -> Tensor:
    """`[..., N, BLOCK, K]` to `[..., N, 3 * BLOCK, K]`: each block with those beside it, zeros beyond the ends."""
    wide = F.pad(x, (0, 0, 0, 0, 1, 1))
    return torch.cat([wide[..., :-2, :, :], x, wide[..., 2:, :, :]], dim=-2)


class LocalAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.merge = nn.Linear(dim, dim)

    def valid(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, t, d = x.shape
        fill = -t % BLOCK
        mask = self.valid(x, mask)

        def blocks(y: Tensor) -> Tensor:  # [B, H, N, BLOCK, K]
            y = F.pad(y.view(b, t, self.heads, d // self.heads).transpose(1, 2), (0, 0, 0, fill))
            return y.unflatten(2, (-1, BLOCK))

        q, k, v = blocks(self.query(x)), neighbours(blocks(self.key(x))), neighbours(blocks(self.value(x)))
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        if mask is not None:
            seen = F.pad(mask, (0, fill)).to(x.dtype).view(b, 1, -1, BLOCK, 1)
            hidden = neighbours(seen).transpose(-1, -2) < 0.5  # [B, 1, N, 1, 3 * BLOCK]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        y = (scores.softmax(-1) @ v).flatten(2, 3)[:, :, :t]
        return self.merge(y.transpose(1, 2).reshape(b, t, d))


class LazyLocalAttention(LocalAttention):
    def valid(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        return mask


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, attention: type[LocalAttention]) -> None:
        super().__init__()
        self.attention, self.norm_a = attention(dim, heads), nn.LayerNorm(dim)
        self.wide, self.narrow, self.norm_f = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm_a(x + self.attention(x, mask))
        return self.norm_f(x + self.narrow(F.gelu(self.wide(x))))


class BlockLocalEncoder(nn.Module):
    def __init__(self, c, attention: type[LocalAttention]) -> None:
        super().__init__()
        self.words = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff, attention) for _ in range(c.num_layers))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for layer in self.layers:
            x = layer(x, mask)
        return x


def subject(attention: type[LocalAttention]) -> Subject:
    return Subject(
        kind="encoder",
        name=f"BlockLocalEncoder({attention.__name__})",
        build=lambda c: BlockLocalEncoder(c, attention),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": False, "sparse": True, "positions": "learned", "padding_side": "right",
            "norm_placement": "post", "activation": "gelu",
        },
    )  # fmt: skip


right, wrong = subject(LocalAttention), subject(LazyLocalAttention)
