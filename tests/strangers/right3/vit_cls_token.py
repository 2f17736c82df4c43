"""A ViT-like classifier: class token first, pre-LN trunk of torch.nn, head on the class token."""
import torch
from torch import nn
from veriformer.properties import Subject

class ViT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.patch = nn.Embedding(c.vocab_size, c.d_model)
        self.cls = nn.Parameter(torch.randn(1, 1, c.d_model) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, c.max_len + 1, c.d_model) * 0.02)
        layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout, "gelu", batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, c.num_layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)
    def forward(self, t, mask=None):
        x = torch.cat([self.cls.expand(len(t), -1, -1), self.patch(t)], 1)
        x = x + self.pos[:, : x.shape[1]]
        if mask is not None:
            mask = ~torch.cat([mask.new_ones(len(t), 1), mask], 1)
        return self.head(self.norm(self.trunk(x, src_key_padding_mask=mask))[:, 0])

common = dict(kind="classifier", build=ViT, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"positions": "learned", "pooling": "cls", "extra_tokens": 1, "norm": "layer", "norm_placement": "pre", "activation": "gelu",
    "padding_side": "right"})
