WHAT = "the carried state is decayed by gamma^i for the i-th token of a chunk, not by gamma^(i + 1), though it is seen from the last token before the chunk: line 46"
"""RetNet: retention in parallel for training, and chunk by chunk with a state for inference."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Retention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(5)
        )

    def gamma(self, like):
        steps = torch.arange(self.heads, dtype=like.dtype, device=like.device)
        return 1 - 2.0 ** (-2.0 - steps)

    def project(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return q, k * self.width**-0.5, v

    def decay(self, length, like):
        n = torch.arange(length, device=like.device)
        behind = n[:, None] - n[None, :]
        powers = self.gamma(like)[:, None, None] ** behind.clamp(min=0).to(like.dtype)
        return powers * (behind >= 0)

    def finish(self, x, y):
        y = F.rms_norm(y, (self.width,), eps=1e-6).transpose(1, 2).flatten(2)
        return self.o_proj(F.silu(self.g_proj(x)) * y)

    def forward(self, x):
        q, k, v = self.project(x)
        return self.finish(x, (q @ k.mT * self.decay(x.shape[1], x)) @ v)

    def chunk(self, x, state):
        """The same for the next tokens; `state` [B, H, K, E] sums what lies before them, seen from the last of it."""
        q, k, v = self.project(x)
        length, gamma = x.shape[1], self.gamma(x)[:, None]
        n = torch.arange(length, dtype=x.dtype, device=x.device)
        inner = (q @ k.mT * self.decay(length, x)) @ v
        cross = (q * (gamma**n)[..., None]) @ state
        kept = k * (gamma ** (length - 1 - n))[..., None]
        state = gamma[..., None] ** length * state + kept.mT @ v
        return self.finish(x, inner + cross), state


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.retention = nn.LayerNorm(dim), Retention(dim, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def ffn(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def forward(self, x):
        return self.ffn(x + self.retention(self.norm1(x)))

    def chunk(self, x, state):
        y, state = self.retention.chunk(self.norm1(x), state)
        return self.ffn(x + y), state


class RetNet(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def recurrent(self, chunks):
        states, outputs = None, []
        for tokens in chunks:
            x = self.embed(tokens)
            if states is None:
                r = self.blocks[0].retention
                states = [x.new_zeros(x.shape[0], r.heads, r.width, r.width) for _ in self.blocks]
            for i, block in enumerate(self.blocks):
                x, states[i] = block.chunk(x, states[i])
            outputs.append(self.head(self.norm(x)))
        return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="RetNet",
    build=lambda c: RetNet(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks: m.recurrent(chunks),
    declares={
        "causal": True,
        "positions": "other",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "structure": "other",
    },
)
