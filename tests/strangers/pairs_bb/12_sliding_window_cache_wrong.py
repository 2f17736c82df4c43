WHAT = 'with a cache, old and new keys together are cut to the last `window` before the chunk attends to them (line 41): of a chunk of several tokens all but the last lose keys that lie inside their window'
"""A small Mistral: RMSNorm, rotary, SwiGLU, a sliding window of 5 and a cache that keeps no more than the window."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 5


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x, positions):
    rates = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device).double() / x.shape[-1])
    angles = positions.double()[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, start, past=None):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        length = x.shape[1]
        positions = start + torch.arange(length, device=x.device)
        q, k = rotate(q, positions), rotate(k, positions)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)[:, :, -WINDOW:]
            v = torch.cat([past[1], v], dim=2)[:, :, -WINDOW:]
        total = k.shape[2]
        i = torch.arange(length, device=x.device)[:, None] + total - length
        j = torch.arange(total, device=x.device)[None, :]
        allowed = (j <= i) & (j > i - WINDOW)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.wo(y.transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, start, past=None):
        y, present = self.attention(self.attention_norm(x), start, past)
        x = x + y
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), present


class Mistral(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("rotary embedding needs heads of even width")
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, start=0, past=None):
        x = self.tok_embeddings(tokens)
        presents = []
        for number, layer in enumerate(self.layers):
            x, present = layer(x, start, None if past is None else past[number])
            presents.append(present)
        return self.output(self.norm(x)), presents


def cached(model, chunks):
    start, past, outputs = 0, None, []
    for chunk in chunks:
        logits, past = model(chunk, start, past)
        start += chunk.shape[1]
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="small Mistral",
    build=lambda c: Mistral(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens)[0],
    cache=cached,
    declares={
        "window": WINDOW,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
)
