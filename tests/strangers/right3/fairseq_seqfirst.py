"""A fairseq-like decoder: time first, sinusoids in halves, scaled embeddings, post-LN, bmm over B*H."""
import math
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

def sinus(T, d, like):
    a = torch.arange(T, dtype=like.dtype)[:, None] * 10000.0 ** (-torch.arange(d // 2, dtype=like.dtype) / (d // 2))
    return torch.cat([a.sin(), a.cos()], 1).to(like.device)

class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.in_proj, self.out = c.num_heads, nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.fc1, self.fc2, self.p = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model), c.dropout
        self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
    def forward(self, x, pad):
        T, B, C = x.shape
        q, k, v = (t.reshape(T, B * self.h, C // self.h).transpose(0, 1) for t in self.in_proj(x).chunk(3, -1))
        w = torch.bmm(q * (C // self.h) ** -0.5, k.transpose(1, 2))
        w = w + torch.full((T, T), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        if pad is not None:
            keep = torch.eye(T, dtype=torch.bool, device=x.device)
            w = w.view(B, self.h, T, T).masked_fill(pad[:, None, None] & ~keep, -math.inf).view(-1, T, T)
        y = torch.bmm(F.dropout(w.softmax(-1), self.p, self.training), v).transpose(0, 1).reshape(T, B, C)
        x = self.ln1(x + F.dropout(self.out(y), self.p, self.training))
        return self.ln2(x + F.dropout(self.fc2(F.relu(self.fc1(x))), self.p, self.training))

class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.layers = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
    def forward(self, tokens, mask=None):
        e = self.emb(tokens) * math.sqrt(self.emb.embedding_dim)
        x = (e + sinus(tokens.size(1), e.size(-1), e)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, None if mask is None else ~mask)
        return F.linear(x, self.emb.weight).transpose(0, 1)

common = dict(kind="decoder", build=Decoder, domain={"d_model": [8, 16, 24], "num_heads": [1, 2, 4]}, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": True, "positions": "sinusoidal", "norm": "layer", "norm_placement": "post", "final_norm": False,
    "activation": "relu", "tied": True, "embedding_scale": True, "padding_side": "right"})
