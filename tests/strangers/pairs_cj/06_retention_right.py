"""Retention (Sun et al. 2023) without xPos and group norm, an ablation: parallel in training, chunkwise in decoding."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Retention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wg, self.wo = (nn.Linear(d_model, d_model, bias=False) for _ in range(5))

    def decay(self, like):
        h = torch.arange(self.heads, dtype=torch.float64, device=like.device)
        return torch.log1p(-(2.0 ** (-2.0 - h))).to(like.dtype)[:, None, None]  # log gamma [H, 1, 1]

    def forward(self, x, state=None):
        """x [B, n, D], state [B, H, K, K] of what came before: the outputs, and the state behind x."""
        B, n, D = x.shape
        q, k, v = (w(x).reshape(B, n, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k = k * k.shape[-1] ** -0.5
        log_gamma = self.decay(x)
        i = torch.arange(n, device=x.device)
        gap = i[:, None] - i
        inner = torch.where(gap >= 0, torch.exp(log_gamma * gap.clamp(min=0)), 0.0)
        y = ((q @ k.mT) * inner) @ v
        if state is not None:
            y = y + torch.exp(log_gamma * (i[:, None] + 1)) * (q @ state)
        fresh = (k * torch.exp(log_gamma * (n - 1 - i)[:, None])).mT @ v
        state = fresh if state is None else torch.exp(log_gamma * n) * state + fresh
        y = y.transpose(1, 2).reshape(B, n, D)
        return self.wo(F.silu(self.wg(x)) * y), state


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.msr = Retention(d_model, heads)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))

    def forward(self, x, state=None):
        y, state = self.msr(self.ln1(x), state)
        x = x + y
        return x + self.ffn(self.ln2(x)), state


class RetNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, states=None):
        states = states or [None] * len(self.blocks)
        x, after = self.embed(tokens), []
        for block, state in zip(self.blocks, states):
            x, state = block(x, state)
            after.append(state)
        return self.head(self.norm(x)), after


def in_chunks(model, chunks):
    states, outputs = None, []
    for chunk in chunks:
        y, states = model(chunk, states)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    build=RetNet,
    forward=lambda m, tokens: m(tokens)[0],
    cache=in_chunks,
    declares={"positions": "other", "norm_placement": "pre", "structure": "other"},
)
