"""Cross-attention in the style of fairseq: heads folded into the batch, one bmm for all."""
import torch
from torch import nn
from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def fold(self, t):
        bsz, length, _ = t.shape
        t = t.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return t.reshape(bsz * self.num_heads, length, self.head_dim)

    def forward(self, x, memory, memory_mask=None):
        bsz, tgt_len, embed_dim = x.shape
        q = self.fold(self.q_proj(x)) * self.head_dim**-0.5
        k = self.fold(self.k_proj(memory))
        v = self.fold(self.v_proj(memory))
        scores = torch.bmm(q, k.transpose(1, 2))
        if memory_mask is not None:
            hidden = ~memory_mask.repeat_interleave(self.num_heads, dim=0)
            scores = scores.masked_fill(hidden[:, None, :], torch.finfo(scores.dtype).min)
        out = torch.bmm(scores.softmax(-1), v)
        out = out.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2)
        return self.out_proj(out.reshape(bsz, tgt_len, embed_dim))


subject = Subject(
    kind="cross_attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
)
