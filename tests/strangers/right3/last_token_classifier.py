"""A causal classifier that reads the last real token (GPT-2 sequence classification)."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

class LastToken(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(
            c.d_model, c.num_heads, c.d_ff, c.dropout, F.gelu, batch_first=True, norm_first=True) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, t, mask=None):
        B, T = t.shape
        x = self.emb(t) + self.pos(torch.arange(T, device=t.device))
        future = torch.ones(T, T, dtype=torch.bool, device=t.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=future)  # right padding lies in the future of every real token
        last = torch.full((B,), T - 1, device=t.device) if mask is None else mask.long().sum(1).sub(1).clamp(min=0)
        return self.score(self.norm(x[torch.arange(B, device=t.device), last]))

common = dict(kind="classifier", build=LastToken, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"pooling": "last", "positions": "learned", "padding_side": "right", "output_bias": False, "norm_placement": "pre",
    "norm": "layer", "activation": "gelu", "final_norm": True})
