"""Sentence classifier, max over time."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Classifier(nn.Module):
    def __init__(self, vocab, d, h, n, d_ff, max_len, classes):
        super().__init__()
        self.h = h
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "ln1": nn.LayerNorm(d), "qkv": nn.Linear(d, 3 * d), "o": nn.Linear(d, d),
                "ln2": nn.LayerNorm(d), "up": nn.Linear(d, d_ff), "down": nn.Linear(d_ff, d),
            })
            for _ in range(n)
        )
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)

    def forward(self, tokens, mask=None):
        B, T = tokens.shape
        if mask is None:
            mask = torch.ones(B, T, dtype=torch.bool, device=tokens.device)
        x = self.tok(tokens) + self.pos(torch.arange(T, device=tokens.device))
        for m in self.layers:
            q, k, v = (t.view(B, T, self.h, -1).transpose(1, 2) for t in m["qkv"](m["ln1"](x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
            x = x + m["o"](y.transpose(1, 2).flatten(2))
            x = x + m["down"](F.gelu(m["up"](m["ln2"](x))))
        x = self.ln(x)
        pooled = x.masked_fill(~mask[..., None], float("-inf")).amax(dim=1)
        return self.head(pooled)


subject = Subject(
    kind="classifier",
    name="max-pool classifier",
    build=lambda c: Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "learned", "pooling": "max", "padding_side": "right", "norm": "layer",
              "norm_placement": "pre", "activation": "gelu"},
)
