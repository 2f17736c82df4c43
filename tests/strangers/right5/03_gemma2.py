WHAT = "Gemma 2: sandwich norms with gain 1 + w, soft caps on scores and on logits, every second layer a sliding window, grouped queries, scaled tied embedding"
import math

import torch
from torch import nn
from torch.nn import functional as F

CAP, LOGIT_CAP, WINDOW = 5.0, 30.0, 4


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.to(y.dtype))).to(x.dtype)


def rope(x, base=10000.0):  # halves
    T, K = x.shape[-2:]
    inverse = base ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
    angle = torch.arange(T, dtype=torch.float64, device=x.device)[:, None] * inverse
    cos, sin = torch.cat([angle, angle], -1).cos().to(x.dtype), torch.cat([angle, angle], -1).sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, d, h, g, local):
        super().__init__()
        self.h, self.g, self.k, self.local = h, g, d // h, local
        self.q_proj, self.o_proj = nn.Linear(d, h * self.k, bias=False), nn.Linear(h * self.k, d, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(d, g * self.k, bias=False) for _ in range(2))

    def forward(self, x, mask):
        B, T, _ = x.shape
        q = rope(self.q_proj(x).view(B, T, self.h, self.k).transpose(1, 2))
        k = rope(self.k_proj(x).view(B, T, self.g, self.k).transpose(1, 2))
        v = self.v_proj(x).view(B, T, self.g, self.k).transpose(1, 2)
        k, v = (t.repeat_interleave(self.h // self.g, 1) for t in (k, v))
        s = CAP * torch.tanh((q @ k.mT) * self.k**-0.5 / CAP)
        far = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)
        seen = (far >= 0) & (far < WINDOW) if self.local else far >= 0
        if mask is not None:
            seen = seen & mask[:, None, None]
        s = s.masked_fill(~seen, -2.3819763e38 if s.dtype != torch.float16 else -65504.0)
        w = F.softmax(s.to(torch.promote_types(s.dtype, torch.float32)), -1).to(v.dtype)
        return self.o_proj((w @ v).transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    def __init__(self, d, h, g, ff, local):
        super().__init__()
        self.attention = Attention(d, h, g, local)
        self.gate, self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)
        self.before_a, self.after_a, self.before_f, self.after_f = (Norm(d) for _ in range(4))

    def forward(self, x, mask):
        x = x + self.after_a(self.attention(self.before_a(x), mask))
        n = self.before_f(x)
        return x + self.after_f(self.down(F.gelu(self.gate(n), approximate="tanh") * self.up(n)))


class Gemma(nn.Module):
    def __init__(self, vocab, d, h, g, layers, ff):
        super().__init__()
        self.d = d
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, h, g, ff, i % 2 == 1) for i in range(layers))
        self.norm = Norm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=d**-0.5)

    def forward(self, ids, mask=None):
        x = self.embed(ids) * math.sqrt(self.d)
        for layer in self.layers:
            x = layer(x, mask)
        return LOGIT_CAP * torch.tanh(self.head(self.norm(x)) / LOGIT_CAP)


from veriformer.properties import Subject


def build(c):
    return Gemma(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="gemma 2", build=build, forward=forward,
    declares={"positions": "rotary", "layout": "halves", "soft_cap": CAP, "grouped_queries": True, "norm": "rms",
              "norm_placement": "other", "final_norm": True, "tied": True, "embedding_scale": True, "activation": "other",
              "bias": False, "output_bias": False, "structure": "other", "padding_side": "both"},
)
