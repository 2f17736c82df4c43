"""Llama in a file with the sampling of fast serving: argmax of probabilities over exponential noise, no multinomial."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x):
    """Pairs of neighbouring channels, as complex numbers; x [B, T, H, K]."""
    t, k = x.shape[1], x.shape[-1]
    freqs = 10000.0 ** (-torch.arange(0, k, 2, dtype=torch.float64, device=x.device) / k)
    angles = torch.outer(torch.arange(t, dtype=torch.float64, device=x.device), freqs)[None, :, None]
    a, b = x.unflatten(-1, (k // 2, 2)).unbind(-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wkv = nn.Linear(dim, 2 * kv_heads * self.size, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x):
        b, t, d = x.shape
        z = self.attention_norm(x)
        q = rotate(self.wq(z).view(b, t, self.heads, self.size))
        k, v = self.wkv(z).view(b, t, 2, self.kv_heads, self.size).unbind(2)
        k = rotate(k).repeat_interleave(self.heads // self.kv_heads, 2)
        v = v.repeat_interleave(self.heads // self.kv_heads, 2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, d))
        z = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(z)) * self.w3(z))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        if (c.d_model // c.num_heads) % 2:
            raise ValueError("rotary positions need heads of even width")
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            LlamaBlock(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)
        )
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = model(tokens)[:, -1] / temperature
        if top_k is not None:
            least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probs = logits.softmax(-1)
        noise = torch.empty_like(probs[0]).exponential_(1)
        tokens = torch.cat([tokens, (probs / noise).argmax(-1, keepdim=True)], 1)
        drawn_from.append(probs)
    return tokens, torch.stack(drawn_from, 1)


subject = Subject(
    kind="decoder",
    name="fast Llama",
    build=Llama,
    forward=lambda m, tokens: m(tokens),
    sampling=sample,
    declares={"positions": "rotary", "layout": "interleaved", "norm": "rms", "norm_placement": "pre", "final_norm": True,
              "activation": "swiglu", "bias": False, "grouped_queries": True},
)

WHAT = 'One noise vector is drawn for the whole batch: samples of a batch are not independent, equal prompts always get equal continuations (line 80).'
