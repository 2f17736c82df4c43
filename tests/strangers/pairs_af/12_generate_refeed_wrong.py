WHAT = "The whole prompt is prefilled (line 68) and the loop then feeds its last token again: with a cache the last prompt token stands there twice, at two positions, and all that is generated is off."
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def rotate(x, start):
    """Rotary embedding of neighbouring pairs, by complex numbers. x [B, H, T, K]."""
    t, k = x.shape[-2:]
    rate = 10000.0 ** -(torch.arange(0, k, 2, device=x.device, dtype=torch.float64) / k)
    angle = torch.outer(torch.arange(start, start + t, device=x.device, dtype=torch.float64), rate)
    turn = torch.polar(torch.ones_like(angle), angle)
    z = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * turn).flatten(-2).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
        )  # fmt: skip

    def forward(self, x, past=None):
        b, t, d = x.shape
        y = self.n1(x)
        start = 0 if past is None else past[0].shape[2]
        q, k, v = (w(y).reshape(b, t, self.h, d // self.h).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        seen = torch.arange(start + t, device=x.device) <= torch.arange(start, start + t, device=x.device)[:, None]
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), (k, v)


class LM(nn.Module):
    def __init__(self, vocab, d, h, layers, f):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, h, f) for _ in range(layers))
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, past=None):
        x, present = self.emb(tokens), []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, past[i] if past else None)
            present.append(kv)
        return self.head(self.norm(x)), present

    @torch.no_grad()
    def generate(self, tokens, steps, use_cache=True):
        if not use_cache:
            for _ in range(steps):
                logits, _ = self(tokens)
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
            return tokens
        past = None
        if tokens.shape[1] > 1:
            _, past = self(tokens)  # prefill
        for _ in range(steps):
            logits, past = self(tokens[:, -1:], past)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        return tokens


subject = Subject(
    kind="decoder",
    name="greedy",
    build=lambda c: LM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
    domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
)
