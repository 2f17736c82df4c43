"""ModernBERT-like: the batch is unpadded into one long sequence, attention is block-diagonal over it."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import Subject


class PackedLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.attn_norm, self.mlp_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.Wqkv, self.Wo = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.Wi, self.Wd = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, same):
        n, d = x.shape
        q, k, v = self.Wqkv(self.attn_norm(x)).view(n, 3, self.h, d // self.h).unbind(1)
        s = torch.einsum("ihk,jhk->hij", q, k) * (d // self.h) ** -0.5
        w = s.masked_fill(~same, float("-inf")).softmax(-1)
        x = x + self.Wo(torch.einsum("hij,jhk->ihk", w, v).reshape(n, d))
        return x + self.Wd(F.gelu(self.Wi(self.mlp_norm(x))))


class PackedEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(PackedLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.final_norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        B, T = tokens.shape
        where = attention_mask.flatten().nonzero().squeeze(1)
        ends = attention_mask.sum(1).cumsum(0)  # cu_seqlens without its leading zero
        rows = torch.arange(where.numel(), device=tokens.device)
        segment = torch.searchsorted(ends, rows, right=True)
        place = (attention_mask.long().cumsum(1) - 1).flatten()[where]
        x = self.tok(tokens.flatten()[where]) + self.pos(place)
        same = segment[:, None] == segment[None, :]
        for layer in self.layers:
            x = layer(x, same)
        x = self.final_norm(x)
        return x.new_zeros(B * T, x.shape[-1]).index_copy(0, where, x).view(B, T, -1)


subject = Subject(
    kind="encoder",
    build=PackedEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "residual": True, "activation": "gelu", "bias": True, "padding_side": "both"},
)
