WHAT = "behind a cache a chunk of several tokens is masked with is_causal, which aligns the mask top-left: query t of the chunk sees keys 0..t of the whole cache instead of all the past and itself (line 58)."
"""LLaMA: RMSNorm, rotary positions, grouped queries, SwiGLU, a key-value cache."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary(x, positions, theta=10000.0):
    dim = x.size(-1)
    inv_freq = theta ** (-torch.arange(0, dim, 2, device=x.device, dtype=x.dtype) / dim)
    angles = positions.to(x.dtype)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return x * angles.cos() + rotate_half(x) * angles.sin()


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        if self.head_dim % 2:
            raise ValueError("rotary positions need an even head width")
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, past=None):
        B, T, _ = x.shape
        offset = 0 if past is None else past[0].size(2)
        positions = torch.arange(offset, offset + T, device=x.device)
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rotary(q, positions), apply_rotary(k, positions)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        present = (k, v)
        S = k.size(2)
        groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1)), present


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x, past=None):
        a, present = self.attention(self.attention_norm(x), past)
        x = x + a
        return x + self.feed_forward(self.ffn_norm(x)), present


class Llama(nn.Module):
    def __init__(self, vocab, dim, n_heads, n_kv_heads, n_layers, hidden):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim, n_heads, n_kv_heads, hidden) for _ in range(n_layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, past=None):
        h = self.tok_embeddings(tokens)
        presents = []
        for i, layer in enumerate(self.layers):
            h, present = layer(h, None if past is None else past[i])
            presents.append(present)
        return self.output(self.norm(h)), presents


def cache(model, chunks):
    past, outputs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


def generate(model, tokens, steps, use_cache):
    past, feed = None, tokens
    for _ in range(steps):
        logits, past = model(feed, past if use_cache else None)
        following = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, following), dim=1)
        feed = following if use_cache else tokens
    return tokens


subject = Subject(
    kind="decoder",
    name="LLaMA",
    build=lambda c: Llama(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=cache,
    generate=generate,
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
        "tied": False,
    },
)
