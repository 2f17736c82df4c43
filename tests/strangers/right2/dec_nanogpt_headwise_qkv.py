"""nanoGPT tutorial style: -1e9 in a tril buffer, tied head. Unusual: the fused projection is laid out head by head
(H, 3, K) as in GPT-NeoX rather than q|k|v; right, since it is one linear map whose rows are merely ordered otherwise."""
import math
import torch
from torch import nn
from veriformer.properties import Subject


class Attn(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.h = c.num_heads
        s.c_attn, s.c_proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        s.drop = nn.Dropout(c.dropout)
        s.register_buffer("tril", torch.tril(torch.ones(c.max_len, c.max_len, dtype=torch.bool)), persistent=False)

    def forward(s, x, mask):
        B, T, D = x.shape
        q, k, v = s.c_attn(x).view(B, T, s.h, 3, D // s.h).permute(3, 0, 2, 1, 4)
        keep = s.tril[:T, :T]
        if mask is not None:
            keep = keep & mask[:, None, None, :]
        att = (q @ k.transpose(-2, -1) / math.sqrt(D // s.h)).masked_fill(~keep, -1e9)
        y = s.drop(att.softmax(-1)) @ v
        return s.drop(s.c_proj(y.transpose(1, 2).reshape(B, T, D)))


class GPT(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.wte, s.wpe = nn.Embedding(c.vocab_size, D), nn.Embedding(c.max_len, D)
        s.ln1 = nn.ModuleList(nn.LayerNorm(D) for _ in range(c.num_layers))
        s.ln2 = nn.ModuleList(nn.LayerNorm(D) for _ in range(c.num_layers))
        s.attn = nn.ModuleList(Attn(c) for _ in range(c.num_layers))
        s.mlp = nn.ModuleList(nn.Sequential(nn.Linear(D, c.d_ff), nn.GELU("tanh"), nn.Linear(c.d_ff, D), nn.Dropout(c.dropout))
                              for _ in range(c.num_layers))
        s.ln_f, s.head = nn.LayerNorm(D), nn.Linear(D, c.vocab_size, bias=False)
        s.head.weight = s.wte.weight

    def forward(s, idx, mask=None):
        x = s.wte(idx) + s.wpe(torch.arange(idx.shape[1], device=idx.device))
        for n1, a, n2, m in zip(s.ln1, s.attn, s.ln2, s.mlp):
            x = x + a(n1(x), mask)
            x = x + m(n2(x))
        return s.head(s.ln_f(x))


args = dict(kind="decoder", build=GPT, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "learned", "beyond_max_len": "error", "padding_side": "right",
                                     "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "gelu_tanh",
                                     "bias": True, "output_bias": False, "tied": True})
