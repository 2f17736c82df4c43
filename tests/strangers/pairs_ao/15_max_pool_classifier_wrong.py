WHAT = "padding is filled with 0 rather than -inf before the maximum is taken, so a padded sample's negative channels pool to 0 (line 40)."
"""Sentence classifier: a small pre-norm encoder, maximum over the positions, linear head."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, allowed):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class Classifier(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, max_len, classes):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.h = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.score = nn.Linear(width, classes)

    def forward(self, tokens, attention_mask=None):
        keep = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x, keep[:, None, None, :])
        x = self.ln_f(x).masked_fill(~keep[..., None], 0.0)
        pooled = x.amax(dim=1)
        return self.score(pooled.masked_fill(~keep.any(1, keepdim=True), 0.0))


subject = Subject(
    kind="classifier",
    name="max-pooling classifier",
    build=lambda c: Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "pooling": "max",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)
