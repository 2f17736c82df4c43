"""Encoder-decoder attention in the manner of fairseq: separate projections, q scaled early, heads folded into the batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from veriformer.properties import Subject

WHAT = "A memory that is padded throughout is handled by adding -inf and patching the softmax's NaN to 0 afterwards: the output is 0, the gradients are NaN."
CAUSE = (
    "nan_to_num mends the forward of a row without visible keys but not the backward: the softmax was taken over a row "
    "of -inf only, its derivative multiplies by its NaN output, and as the mask was added (not filled in) this NaN "
    "runs on into the scores, the queries, the keys and all projections."
)


class EncoderDecoderAttention(nn.Module):
    """Attention of a decoder's states over an encoder's output."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(proj.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)

    def _fold(self, x: Tensor) -> Tensor:
        bsz, length, _ = x.shape
        x = x.reshape(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return x.reshape(bsz * self.num_heads, length, self.head_dim)

    def _normalise(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Softmax over the visible keys; all zero where there is none."""
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        return F.softmax(scores, dim=-1).masked_fill(~visible, 0.0)

    def forward(self, query: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        bsz, tgt_len, _ = query.shape
        src_len = memory.shape[1]
        q = self._fold(self.q_proj(query) * self.scaling)
        k, v = self._fold(self.k_proj(memory)), self._fold(self.v_proj(memory))
        scores = torch.bmm(q, k.transpose(1, 2))
        if memory_mask is None:
            attn = F.softmax(scores, dim=-1)
        else:
            visible = memory_mask[:, None, None, :].expand(bsz, self.num_heads, tgt_len, src_len)
            attn = self._normalise(scores, visible.reshape(bsz * self.num_heads, tgt_len, src_len))
        out = torch.bmm(attn, v).view(bsz, self.num_heads, tgt_len, self.head_dim)
        return self.out_proj(out.transpose(1, 2).reshape(bsz, tgt_len, self.embed_dim))


class PatchedEncoderDecoderAttention(EncoderDecoderAttention):
    def _normalise(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Softmax over the visible keys; all zero where there is none."""
        bias = torch.zeros_like(scores).masked_fill(~visible, float("-inf"))
        return torch.nan_to_num(F.softmax(scores + bias, dim=-1), nan=0.0)


def _subject(cls, name):
    return Subject(
        kind="cross_attention",
        name=name,
        build=lambda c: cls(c.d_model, c.num_heads),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    )


right = _subject(EncoderDecoderAttention, "encoder-decoder attention")
wrong = _subject(PatchedEncoderDecoderAttention, "encoder-decoder attention (patched)")
