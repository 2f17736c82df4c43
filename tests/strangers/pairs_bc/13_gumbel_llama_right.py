"""A small Llama, and a sampler that needs no multinomial: Gumbel noise and an argmax."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, base=10000.0):
    T, K = x.shape[-2:]
    freq = base ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LlamaLayer(nn.Module):
    def __init__(self, dim, heads, kv_heads, inner):
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        if self.width % 2:
            raise ValueError("rotary needs heads of even width")
        self.attention_norm = nn.Parameter(torch.ones(dim))
        self.ffn_norm = nn.Parameter(torch.ones(dim))
        self.wq = nn.Linear(dim, heads * self.width, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.wo = nn.Linear(heads * self.width, dim, bias=False)
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        h = rms_norm(x, self.attention_norm)
        q = rotate(self.wq(h).view(B, T, self.heads, self.width).transpose(1, 2))
        k = rotate(self.wk(h).view(B, T, self.kv_heads, self.width).transpose(1, 2))
        v = self.wv(h).view(B, T, self.kv_heads, self.width).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = rms_norm(x, self.ffn_norm)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            LlamaLayer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)
        )
        self.norm = nn.Parameter(torch.ones(c.d_model))
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(rms_norm(x, self.norm))


@torch.no_grad()
def sample(m, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = m(tokens)[:, -1]
        if top_k is not None:
            kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        uniform = torch.rand_like(logits).clamp_min(torch.finfo(logits.dtype).tiny)
        gumbel = -torch.log(-torch.log(uniform))
        choice = (logits / temperature + gumbel).argmax(-1, keepdim=True)
        drawn_from.append((logits / temperature).softmax(-1))
        tokens = torch.cat([tokens, choice], dim=1)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="Llama with a Gumbel sampler",
    build=Llama,
    forward=lambda m, tokens: m(tokens),
    sampling=sample,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "grouped_queries": True,
    },
)
