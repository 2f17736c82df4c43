WHAT = "After unpadding, the segment of a packed token is looked up with searchsorted(right=False) (line 41), so the first token of each sequence belongs to the sequence before it: it attends there and is hidden from its own."
"""Encoder without padding: the real tokens of a batch are packed into one row, attention is block diagonal."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class EncoderLayer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.ffn_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.Wqkv, self.Wo = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.Wi, self.Wf = nn.Linear(d, d_ff), nn.Linear(d_ff, d)

    def forward(self, x, same):
        total, d = x.shape
        q, k, v = self.Wqkv(self.attn_norm(x)).view(total, 3, self.heads, -1).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        x = x + self.Wo(y.transpose(0, 1).reshape(total, d))
        return x + self.Wf(F.gelu(self.Wi(self.ffn_norm(x))))


class PackedEncoder(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList([EncoderLayer(d, heads, d_ff) for _ in range(layers)])
        self.final_norm = nn.LayerNorm(d)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        columns = torch.arange(T, device=tokens.device).expand(B, T)
        x = self.tok(tokens[real]) + self.pos(columns[real])

        ends = real.sum(1).cumsum(0)  # cu_seqlens without its leading 0
        index = torch.arange(x.shape[0], device=tokens.device)
        segment = torch.searchsorted(ends, index, right=False)
        same = segment[:, None] == segment[None, :]
        for layer in self.layers:
            x = layer(x, same)
        out = x.new_zeros(B, T, x.shape[-1])
        out[real] = self.final_norm(x)
        return out


subject = Subject(
    kind="encoder",
    name="packed encoder",
    build=lambda c: PackedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)
