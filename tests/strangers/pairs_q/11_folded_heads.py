"""Cross-attention as older sequence libraries have it: time first inside, heads folded into the batch, bmm."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

WHAT = "The padding mask of the memory is tiled over heads in the wrong order: the heads of a sample get the masks of other samples."
CAUSE = (
    "Scores are laid out [batch * heads] with heads innermost, but memory_mask.repeat(heads, 1) has the batch innermost: row b * H + h "
    "takes the mask of sample (b * H + h) mod B. With one sample, one head or equal masks nothing shows."
)


def tile_inner(mask: Tensor, heads: int) -> Tensor:
    return mask.repeat_interleave(heads, dim=0)


def tile_outer(mask: Tensor, heads: int) -> Tensor:
    return mask.repeat(heads, 1)


class EncoderDecoderAttention(nn.Module):
    """Time x Batch x Channel, as the layers around it."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, tile) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.scaling, self.tile = self.head_dim**-0.5, tile
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout_module = nn.Dropout(dropout)

    def fold(self, x: Tensor, batch: int) -> Tensor:
        return x.contiguous().view(-1, batch * self.num_heads, self.head_dim).transpose(0, 1)

    def forward(self, query: Tensor, memory: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        tgt_len, bsz, _ = query.shape
        q = self.fold(self.q_proj(query) * self.scaling, bsz)
        k = self.fold(self.k_proj(memory), bsz)
        v = self.fold(self.v_proj(memory), bsz)
        scores = torch.bmm(q, k.transpose(1, 2))  # [B * H, T, S]
        if key_mask is not None:
            hidden = ~self.tile(key_mask, self.num_heads).unsqueeze(1)
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        if key_mask is not None:
            weights = weights.masked_fill(hidden, 0.0)  # a memory without one real position gives nothing
        attended = torch.bmm(self.dropout_module(weights), v)
        attended = attended.transpose(0, 1).contiguous().view(tgt_len, bsz, self.embed_dim)
        return self.out_proj(attended), weights.view(bsz, self.num_heads, tgt_len, -1)


def batch_first(m, x, memory, memory_mask=None):
    return m(x.transpose(0, 1), memory.transpose(0, 1), memory_mask)[0].transpose(0, 1)


def weights(m, x, memory, memory_mask=None):
    return m(x.transpose(0, 1), memory.transpose(0, 1), memory_mask)[1]


right, wrong = (
    Subject(
        kind="cross_attention",
        name="encoder-decoder attention",
        build=lambda c, tile=tile: EncoderDecoderAttention(c.d_model, c.num_heads, c.dropout, tile),
        forward=batch_first,
        weights=weights,
    )
    for tile in (tile_inner, tile_outer)
)
