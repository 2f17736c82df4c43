"""A small RetNet (Sun et al. 2023): retention in its parallel form for training, chunk by chunk for decoding."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Retention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkvg = nn.Linear(d, 4 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def project(self, x):
        B, T, D = x.shape
        q, k, v, gate = self.qkvg(x).chunk(4, dim=-1)
        q, k, v = (t.view(B, T, self.h, D // self.h).transpose(1, 2) for t in (q, k, v))
        return q, k * (D // self.h) ** -0.5, v, F.silu(gate)

    def gamma(self, x):
        return 1 - 2.0 ** (-2.0 - torch.arange(self.h, dtype=x.dtype, device=x.device))[:, None, None]

    def forward(self, x, state=None):
        B, T, D = x.shape
        q, k, v, gate = self.project(x)
        gamma = self.gamma(x)
        i = torch.arange(T, dtype=x.dtype, device=x.device)
        age = i[:, None] - i[None, :]
        decay = torch.where(age >= 0, gamma ** age.clamp(min=0), 0.0)
        y = (q @ k.transpose(-1, -2) * decay) @ v
        if state is not None:
            y = y + gamma ** (i + 1)[:, None] * (q @ state)
        carried = (k * gamma ** (T - 1 - i)[:, None]).transpose(-1, -2) @ v
        if state is not None:
            carried = carried + gamma**T * state
        return self.out(gate * y.transpose(1, 2).reshape(B, T, D)), carried


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.retention = Retention(d, h)
        self.ffn = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))

    def forward(self, x, state=None):
        y, state = self.retention(self.norm1(x), state)
        x = x + y
        return x + self.ffn(self.norm2(x)), state


class RetNet(nn.Module):
    def __init__(self, vocab, d, h, f, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Block(d, h, f) for _ in range(depth)])
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, states=None):
        states = states or [None] * len(self.blocks)
        x, new = self.embed(tokens), []
        for block, state in zip(self.blocks, states):
            x, state = block(x, state)
            new.append(state)
        return self.head(self.norm(x)), new


def cached(model, chunks, reorder=None):
    outputs, states = [], None
    for n, chunk in enumerate(chunks):
        if n == 1 and reorder is not None:
            states = [state[reorder] for state in states]
        logits, states = model(chunk, states)
        outputs.append(logits)
    return outputs


subject = Subject(
    kind="decoder",
    build=lambda c: RetNet(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, tokens: m(tokens)[0],
    cache=cached,
    declares={"positions": "other", "structure": "other", "norm": "rms", "norm_placement": "pre", "final_norm": True},
)
