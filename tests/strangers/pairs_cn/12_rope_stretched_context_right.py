"""A GPT whose rotary base was raised to stretch its context from 8 to 64 tokens (NTK by hand)."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject

TRAINED, LONGEST, THETA = 8, 64, 10_000.0


def rotate(x, angles):
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        if (width // heads) % 2:
            raise ValueError("rotary positions want heads of even width")
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, past=None):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        behind = 0 if past is None else past[0].shape[2]
        total = behind + x.shape[1]
        half = q.shape[-1] // 2
        stretch = LONGEST / TRAINED
        theta = THETA * stretch
        rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(behind, total, device=x.device, dtype=torch.float64), rates)
        q, k = rotate(q, angles), rotate(k, angles)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        seen = torch.ones(x.shape[1], total, dtype=torch.bool, device=x.device).tril(behind)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(y.transpose(1, 2).flatten(2)), (k, v)


class Layer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x, past=None):
        y, now = self.attention(self.n1(x), past)
        x = x + y
        return x + self.down(F.gelu(self.up(self.n2(x)))), now


class LongGPT(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens, past=None):
        x, kept = self.wte(tokens), []
        for i, layer in enumerate(self.layers):
            x, now = layer(x, None if past is None else past[i])
            kept.append(now)
        return self.head(self.norm(x)), kept


def chunked(model, chunks):
    outputs, past = [], None
    for chunk in chunks:
        logits, past = model(chunk, past)
        outputs.append(logits)
    return outputs


subject = Subject(
    kind="decoder",
    name="GPT with a stretched context",
    build=lambda c: LongGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=chunked,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "base": THETA * LONGEST / TRAINED,
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "gelu",
        "bias": False,
    },
)
