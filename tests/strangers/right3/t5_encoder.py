"""A T5 encoder: bucketed bias of the first layer shared by all, unscaled scores, RMS norm, ReLU."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

def buckets(T, n=16, far=32):
    rel = torch.arange(T)[None, :] - torch.arange(T)[:, None]
    n //= 2
    side, dist, exact = (rel > 0).long() * n, rel.abs(), n // 2
    log = exact + (torch.log(dist.clamp(min=1).double() / exact) / math.log(far / exact) * (n - exact)).long()
    return side + torch.where(dist < exact, dist, log.clamp(max=n - 1))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model, bias=False), nn.Linear(c.d_model, c.d_model, bias=False)
        self.wi, self.wo = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)
        self.n1, self.n2, self.drop = nn.RMSNorm(c.d_model, 1e-6), nn.RMSNorm(c.d_model, 1e-6), nn.Dropout(c.dropout)
    def forward(self, x, bias):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        p = self.drop((q @ k.mT + bias).softmax(-1))
        x = x + self.drop(self.o((p @ v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.wo(self.drop(self.wi(self.n2(x)).relu())))

class T5(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.rel = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(16, c.num_heads)
        self.blocks, self.norm = nn.ModuleList(Block(c) for _ in range(c.num_layers)), nn.RMSNorm(c.d_model, 1e-6)
    def forward(self, t, mask=None):
        x, bias = self.emb(t), self.rel(buckets(t.size(1)).to(t.device)).permute(2, 0, 1)[None]
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, None], torch.finfo(x.dtype).min)
        for b in self.blocks:
            x = b(x, bias)
        return self.norm(x)

common = dict(kind="encoder", build=T5, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": False, "positions": "t5", "attention_scale": 1, "norm": "rms", "norm_placement": "pre", "final_norm": True,
    "activation": "relu", "bias": False, "num_buckets": 16, "max_distance": 32, "bidirectional": True})
