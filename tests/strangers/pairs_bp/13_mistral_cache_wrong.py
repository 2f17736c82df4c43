WHAT = "With a cache only the causal mask is applied, on the belief that the rolling buffer bounds the window (line 45): true for one token at a time, but in a chunk of several tokens all but the first see keys older than the window."
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 3


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary(x, start):
    half = x.size(-1) // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(start, start + x.size(-2), dtype=torch.float64, device=x.device)[:, None] * inv
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MistralLayer(nn.Module):
    def __init__(self, dim, heads, inner, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def attend(self, x, start, past, key_mask):
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotary(q, start), rotary(k, start)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        # the rolling buffer: no later query reaches further back than window - 1 keys
        present = k[:, :, -(self.window - 1) :], v[:, :, -(self.window - 1) :]
        s = k.size(2)
        rows = torch.arange(s - t, s, device=x.device)[:, None]
        cols = torch.arange(s, device=x.device)[None, :]
        allowed = cols <= rows
        if past is None:
            allowed = allowed & (cols > rows - self.window)
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, None, -s:]
        scores = (q @ k.mT) * q.size(-1) ** -0.5
        probs = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0)
        return self.wo((probs @ v).transpose(1, 2).reshape(b, t, d)), present

    def forward(self, x, start, past, key_mask):
        out, present = self.attend(rms(x, self.attn_norm), start, past, key_mask)
        x = x + out
        h = rms(x, self.ffn_norm)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), present


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        if (c.d_model // c.num_heads) % 2:
            raise ValueError("head_dim must be even")
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([MistralLayer(c.d_model, c.num_heads, c.d_ff, WINDOW) for _ in range(c.num_layers)])
        self.norm = nn.Parameter(torch.ones(c.d_model))
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, past=None, start=0):
        x = self.tok_embeddings(tokens)
        presents = []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, start, None if past is None else past[i], attention_mask)
            presents.append(present)
        return self.output(rms(x, self.norm)), presents


def cached(model, chunks, attention_mask=None):
    outputs, past, start = [], None, 0
    for chunk in chunks:
        stop = start + chunk.size(1)
        seen = None if attention_mask is None else attention_mask[:, :stop]
        logits, past = model(chunk, seen, past, start)
        outputs.append(logits)
        start = stop
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="Mistral",
    build=Mistral,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
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
        "empty_row": "zeros",
    },
)
