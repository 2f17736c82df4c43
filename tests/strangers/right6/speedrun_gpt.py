"""nanoGPT speedrun: gainless RMSNorm, QK-norm, rotary, squared ReLU, value residual, capped logits."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject


@dataclass
class GPTConfig:
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    d_ff: int


def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        if dim % 2:
            raise ValueError("rotary needs an even width of heads")
        self.dim, self.base = dim, base

    def forward(self, x):  # B T H K
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        inv = self.base ** (-torch.arange(0, self.dim, 2, device=x.device, dtype=wide) / self.dim)
        freqs = torch.outer(torch.arange(x.size(1), device=x.device, dtype=wide), inv)
        cos, sin = freqs.cos()[None, :, None, :].to(x.dtype), freqs.sin()[None, :, None, :].to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], -1)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.rotary = Rotary(config.n_embd // config.n_head)
        self.lamb = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, v1):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        if v1 is None:
            v1 = v
        v = (1 - self.lamb) * v + self.lamb * v1
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)), v1


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.d_ff, bias=False)
        self.c_proj = nn.Linear(config.d_ff, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn, self.mlp = CausalSelfAttention(config), MLP(config)

    def forward(self, x, v1):
        y, v1 = self.attn(norm(x), v1)
        x = x + y
        return x + self.mlp(norm(x)), v1


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = norm(self.transformer.wte(idx))
        v1 = None
        for block in self.transformer.h:
            x, v1 = block(x, v1)
        logits = self.lm_head(norm(x))
        logits = 30 * torch.tanh(logits / 30)
        if targets is None:
            return logits, None
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return logits, F.cross_entropy(wide.view(-1, wide.size(-1)), targets.reshape(-1), ignore_index=-100)


def build(c: DrawnConfig):
    return GPT(GPTConfig(c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.d_ff))


def forward(model, tokens):
    return model(tokens)[0]


declared = Subject(
    kind="decoder", name="speedrun GPT", build=build, forward=forward,
    loss=lambda model, tokens, labels: model(tokens, labels)[1],
    declares={
        "causal": True, "positions": "rotary", "layout": "halves", "base": 10000, "norm": "rms", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "other", "bias": False, "output_bias": False, "tied": True,
        "query_key_norm": True, "attention_scale": "1/sqrt(d_head)", "shifts_labels": False, "structure": "other",
        "ignore_index": -100, "beyond_max_len": "works",
    },
)
undeclared = Subject(kind="decoder", build=build, forward=forward)
