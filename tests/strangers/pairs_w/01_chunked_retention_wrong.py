WHAT = "What the state brings into a chunk is decayed by gamma^i instead of gamma^(i + 1): a token is one step too near across every border of chunks (line 45)."

"""A retentive decoder: decaying linear attention, computed in chunks that hand a state on."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHUNK = 4


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.gain


class Retention(nn.Module):
    """o_t = sum over s <= t of gamma^(t - s) (q_t . k_s) v_s, one gamma a head, gated and normalised by head."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.heads, self.width = num_heads, d_model // num_heads
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(5))
        self.group_norm = RMSNorm(self.width)
        self.register_buffer("gamma", 1 - 2.0 ** (-2 - torch.arange(num_heads)), persistent=False)

    def split(self, x):
        return x.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

    def chunk(self, q, k, v, state):
        """One chunk [B, H, n, d] and the state [B, H, d, d] behind the tokens before it."""
        n = q.shape[2]
        step = torch.arange(n, device=q.device, dtype=q.dtype)
        gamma = self.gamma.to(q.dtype)[:, None, None]
        distance = step[:, None] - step[None, :]
        decay = torch.where(distance >= 0, gamma ** distance.clamp(min=0), 0.0)
        inner = (q @ k.transpose(-1, -2) * decay) @ v
        cross = (q @ state) * gamma ** step[:, None]
        ahead = k * gamma ** (n - 1 - step[:, None])
        state = state * gamma**n + ahead.transpose(-1, -2) @ v
        return inner + cross, state

    def forward(self, x, state=None):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)) * self.width**-0.5, self.split(self.v(x))
        if state is None:
            state = x.new_zeros(x.shape[0], self.heads, self.width, self.width)
        outputs = []
        for begin in range(0, x.shape[1], CHUNK):
            piece = slice(begin, begin + CHUNK)
            y, state = self.chunk(q[:, :, piece], k[:, :, piece], v[:, :, piece], state)
            outputs.append(y)
        y = self.group_norm(torch.cat(outputs, dim=2)).transpose(1, 2).flatten(2)
        return self.out(y * F.silu(self.gate(x))), state


class Block(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.norm_mix, self.norm_ffn = RMSNorm(d_model), RMSNorm(d_model)
        self.retention = Retention(d_model, num_heads)
        self.up, self.gate = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x, state=None):
        y, state = self.retention(self.norm_mix(x), state)
        x = x + y
        y = self.norm_ffn(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), state


class RetNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, states=None):
        x = self.embed(tokens)
        states = states if states is not None else [None] * len(self.blocks)
        after = []
        for block, state in zip(self.blocks, states):
            x, state = block(x, state)
            after.append(state)
        return self.head(self.norm(x)), after


def stream(model, chunks):
    states, outputs = None, []
    for chunk in chunks:
        logits, states = model(chunk, states)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="retentive decoder",
    build=RetNet,
    forward=lambda model, tokens: model(tokens)[0],
    cache=stream,
    declares={
        "causal": True,
        "positions": "other",
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
        "bias": False,
        "structure": "other",
    },
)
