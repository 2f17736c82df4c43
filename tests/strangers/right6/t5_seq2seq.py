"""T5: buckets shared by all layers, scale 1, RMSNorm, no biases, tied head scaled by d^-0.5."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject

BUCKETS, FAR = 12, 30


def bucket(relative, bidirectional, n=BUCKETS, far=FAR):
    out = torch.zeros_like(relative)
    if bidirectional:
        n //= 2
        out = out + (relative > 0).long() * n
        relative = relative.abs()
    else:
        relative = -relative.clamp(max=0)
    exact = n // 2
    large = exact + (
        (relative.clamp(min=1).double() / exact).log() / math.log(far / exact) * (n - exact)
    ).long()
    return out + torch.where(relative < exact, relative, large.clamp(max=n - 1))


class T5LayerNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        w = x if x.dtype == torch.float64 else x.float()
        return self.weight * (x * torch.rsqrt(w.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, memory, bias):
        def shape(z):
            return z.view(z.shape[0], z.shape[1], self.h, -1).transpose(1, 2)

        q, k, v = shape(self.q(x)), shape(self.k(memory)), shape(self.v(memory))
        scores = torch.matmul(q, k.transpose(3, 2)) + bias
        out = torch.matmul(F.softmax(scores, -1), v)
        return self.o(out.transpose(1, 2).contiguous().view(x.shape))


class Block(nn.Module):
    def __init__(self, d, h, f, p, cross):
        super().__init__()
        self.norms = nn.ModuleList(T5LayerNorm(d) for _ in range(3 if cross else 2))
        self.attn = Attention(d, h)
        self.cross = Attention(d, h) if cross else None
        self.wi, self.wo, self.drop = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False), nn.Dropout(p)

    def forward(self, x, bias, memory=None, memory_bias=None):
        y = self.norms[0](x)
        x = x + self.drop(self.attn(y, y, bias))
        if self.cross is not None:
            x = x + self.drop(self.cross(self.norms[1](x), memory, memory_bias))
        return x + self.drop(self.wo(self.drop(self.wi(self.norms[-1](x)).relu())))


class Stack(nn.Module):
    def __init__(self, c, decoder):
        super().__init__()
        self.decoder = decoder
        self.relative = nn.Embedding(BUCKETS, c.num_heads)
        self.block = nn.ModuleList(
            Block(c.d_model, c.num_heads, c.d_ff, c.dropout, decoder) for _ in range(c.num_layers)
        )
        self.final, self.drop = T5LayerNorm(c.d_model), nn.Dropout(c.dropout)

    def forward(self, x, mask, memory=None, memory_mask=None):
        t = x.shape[1]
        i = torch.arange(t, device=x.device)
        bias = self.relative(bucket(i[None, :] - i[:, None], not self.decoder)).permute(2, 0, 1)[None]
        see = torch.ones(1, 1, t, t, dtype=torch.bool, device=x.device)
        see = see.tril() if self.decoder else see
        if mask is not None:
            see = see & mask[:, None, None].bool()
        low = torch.finfo(x.dtype).min / 2
        bias = torch.where(see, bias, low)
        memory_bias = 0.0
        if memory_mask is not None:
            memory_bias = torch.zeros(memory_mask.shape, dtype=x.dtype, device=x.device)
            memory_bias = memory_bias.masked_fill(~memory_mask.bool(), low)[:, None, None]
        x = self.drop(x)
        for block in self.block:
            x = block(x, bias, memory, memory_bias)
        return self.drop(self.final(x))


class T5(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared, self.scale = nn.Embedding(c.vocab_size, c.d_model), c.d_model**-0.5
        self.encoder, self.decoder = Stack(c, False), Stack(c, True)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encoder(self.shared(source), source_mask)
        y = self.decoder(self.shared(target), target_mask, memory, source_mask)
        return F.linear(y * self.scale, self.shared.weight)


def forward(model, source, target, source_mask=None, target_mask=None):
    return model(source, target, source_mask, target_mask)


declared = Subject(
    kind="encoder_decoder", name="T5", build=T5, forward=forward,
    declares={
        "causal": True, "positions": "t5", "num_buckets": BUCKETS, "max_distance": FAR, "attention_scale": 1,
        "norm": "rms", "norm_placement": "pre", "final_norm": True, "residual": True, "activation": "relu",
        "bias": False, "output_bias": False, "tied": True, "padding_side": "both", "beyond_max_len": "works",
        "embedding_scale": False,
    },
)
undeclared = Subject(kind="encoder_decoder", build=T5, forward=forward)
