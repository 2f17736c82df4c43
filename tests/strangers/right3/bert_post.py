"""A BERT encoder: learned positions, embedding norm, post-LN, additive extended mask."""
import math
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

class BertLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.heads = c.num_heads
        self.query, self.key, self.value, self.dense = (nn.Linear(d, d) for _ in range(4))
        self.inter, self.outp = nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d)
        self.ln1, self.ln2, self.drop = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12), nn.Dropout(c.dropout)
    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)
    def forward(self, x, ext):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        p = self.drop((q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + ext).softmax(-1))
        x = self.ln1(x + self.drop(self.dense((p @ v).permute(0, 2, 1, 3).flatten(2))))
        return self.ln2(x + self.drop(self.outp(F.gelu(self.inter(x)))))

class Bert(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.ln, self.drop = nn.LayerNorm(c.d_model, eps=1e-12), nn.Dropout(c.dropout)
        self.layer = nn.ModuleList([BertLayer(c) for _ in range(c.num_layers)])
    def forward(self, ids, mask=None):
        x = self.drop(self.ln(self.word(ids) + self.pos.weight[: ids.shape[1]]))
        mask = torch.ones_like(ids) if mask is None else mask
        ext = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layer:
            x = layer(x, ext)
        return x

common = dict(kind="encoder", build=Bert, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu",
    "bias": True, "padding_side": "right"})
