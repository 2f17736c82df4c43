"""Cross-attention of DETR's decoder: object queries look at image tokens, some of which are padding of the batch."""
import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, t):
        """[B, L, D] -> [B * H, L, D / H]"""
        b, l, _ = t.shape
        return t.view(b, l, self.num_heads, self.head_dim).transpose(1, 2).reshape(b * self.num_heads, l, self.head_dim)

    def forward(self, hidden_states, encoder_hidden_states, pixel_mask=None):
        b, tgt_len, dim = hidden_states.shape
        src_len = encoder_hidden_states.size(1)
        query = self._shape(self.q_proj(hidden_states) * self.scaling)
        key = self._shape(self.k_proj(encoder_hidden_states))
        value = self._shape(self.v_proj(encoder_hidden_states))
        if pixel_mask is None:
            bias = query.new_zeros(1, 1, 1)
        else:
            bias = torch.zeros_like(pixel_mask, dtype=query.dtype)
            bias = bias.masked_fill(~pixel_mask, torch.finfo(query.dtype).min)
            bias = bias.repeat_interleave(self.num_heads, dim=0)[:, None, :]
        scores = torch.baddbmm(bias.expand(b * self.num_heads, tgt_len, src_len), query, key.transpose(1, 2))
        out = torch.bmm(scores.softmax(dim=-1), value)
        out = out.view(b, self.num_heads, tgt_len, self.head_dim).transpose(1, 2).reshape(b, tgt_len, dim)
        return self.out_proj(out)


subject = Subject(
    kind="cross_attention",
    name="detr cross attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"bias": True},
)
