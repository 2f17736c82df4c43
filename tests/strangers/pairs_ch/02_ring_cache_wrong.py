"""Sliding-window decoder with ALiBi whose decoding keeps only WINDOW keys, in a ring."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class Ring:
    """Slot s holds the newest position p with p % WINDOW == s."""

    def __init__(self):
        self.k = self.v = None
        self.end = 0

    def places(self, device):
        slots = torch.arange(WINDOW, device=device)
        last = self.end - 1
        return last - (last - slots) % WINDOW  # below 0: never written

    def view(self, k, v):
        """Keys and values that a new chunk may look at, and their positions."""
        fresh = torch.arange(self.end, self.end + k.shape[2], device=k.device)
        if self.k is None:
            return k, v, fresh
        return torch.cat([self.k, k], 2), torch.cat([self.v, v], 2), torch.cat([self.places(k.device), fresh])

    def write(self, k, v):
        t = k.shape[2]
        end = self.end + t
        if t >= WINDOW:  # prefill: no scatter
            self.k = k[:, :, -WINDOW:]
            self.v = v[:, :, -WINDOW:]
        else:
            if self.k is None:
                self.k = k.new_zeros(*k.shape[:2], WINDOW, k.shape[-1])
                self.v = torch.zeros_like(self.k)
            slots = torch.arange(self.end, end, device=k.device) % WINDOW
            self.k = self.k.index_copy(2, slots, k)
            self.v = self.v.index_copy(2, slots, v)
        self.end = end


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.fc, self.out = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.register_buffer("slopes", 2.0 ** (-8 * torch.arange(1, self.h + 1).double() / self.h), persistent=False)

    def forward(self, x, ring=None):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        start = 0 if ring is None else ring.end
        at = torch.arange(start, start + t, device=x.device)
        keys, values, where = (k, v, at) if ring is None else ring.view(k, v)
        if ring is not None:
            ring.write(k, v)
        gap = at[:, None] - where[None, :]
        seen = (gap >= 0) & (gap < WINDOW) & (where >= 0)
        bias = -self.slopes[:, None, None].to(x.dtype) * gap.to(x.dtype)
        scores = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
        y = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.out(F.relu(self.fc(self.ln2(x))))


class WindowLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.ln = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, rings=None):
        x = self.wte(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if rings is None else rings[i])
        return self.head(self.ln(x))


def decode_in_chunks(model, chunks):
    rings = [Ring() for _ in model.blocks]
    return [model(chunk, rings) for chunk in chunks]


subject = Subject(
    kind="decoder",
    name="sliding window with a ring",
    build=WindowLM,
    forward=lambda m, tokens: m(tokens),
    cache=decode_in_chunks,
    declares={"positions": "alibi", "slopes": "geometric", "window": WINDOW, "norm": "layer",
              "norm_placement": "pre", "activation": "relu"},
)

WHAT = 'The prefill copies the last WINDOW keys into slots 0, 1, ... in order instead of to position % WINDOW: when a chunk of WINDOW or more does not end at a multiple of WINDOW, later steps take the keys for other positions (line 34).'
