WHAT = "In the chunkwise recurrent form what comes from earlier chunks is decayed one step too little (gamma^n instead of gamma^(n+1)), so that it parts from the parallel form (line 68)."
# Retentive Network (Sun et al. 2023). Parallel form for training, chunkwise recurrent form for inference.
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def theta_shift(x, sin, cos):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return x * cos + torch.stack((-x2, x1), dim=-1).flatten(-2) * sin


class RelPos(nn.Module):
    def __init__(self, head_dim, heads):
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, head_dim // 2, dtype=torch.float64))
        self.register_buffer("angle", angle.repeat_interleave(2), persistent=False)
        gamma = 1 - 2.0 ** (-2 - torch.arange(heads, dtype=torch.float64))
        self.register_buffer("gamma", gamma, persistent=False)

    def forward(self, start, length, dtype):
        index = torch.arange(start, start + length, device=self.angle.device).double()
        angles = index[:, None] * self.angle.double()
        return angles.sin().to(dtype), angles.cos().to(dtype)


class MultiScaleRetention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.key_dim = heads, dim // heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x, sin, cos):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, self.key_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k = k * self.key_dim**-0.5
        return theta_shift(q, sin, cos), theta_shift(k, sin, cos), v

    def finish(self, x, y):
        y = F.rms_norm(y, (self.key_dim,), eps=1e-6)  # a group a head
        return self.out_proj(F.silu(self.g_proj(x)) * y.transpose(1, 2).flatten(2))

    def within(self, q, k, v, gamma):
        n = torch.arange(q.size(2), device=q.device)
        distance = n[:, None] - n[None, :]
        decay = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0.0).to(q.dtype)
        return (q @ k.transpose(-1, -2) * decay) @ v

    def parallel(self, x, rel, gamma):
        q, k, v = self.project(x, *rel)
        return self.finish(x, self.within(q, k, v, gamma))

    def chunkwise(self, x, rel, gamma, state):
        """state [B, H, K, V]: sum over the past of gamma^(distance to its last token) k v^T."""
        q, k, v = self.project(x, *rel)
        length = x.size(1)
        n = torch.arange(length, device=x.device)
        y = self.within(q, k, v, gamma)
        carry = (gamma[:, None] ** (length - 1 - n))[..., None].to(x.dtype)
        new = (k * carry).transpose(-1, -2) @ v
        if state is not None:
            inner = (gamma[:, None] ** n)[..., None].to(x.dtype)
            y = y + inner * (q @ state)
            new = new + (gamma**length)[:, None, None].to(x.dtype) * state
        return self.finish(x, y), new


class RetNetBlock(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.retention = MultiScaleRetention(dim, heads)
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(dim, ffn, bias=False), nn.Linear(ffn, dim, bias=False)

    def ffn(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class RetNet(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("head_dim must be even")
        self.embed = nn.Embedding(vocab, dim)
        self.rel = RelPos(dim // heads, heads)
        self.blocks = nn.ModuleList([RetNetBlock(dim, heads, ffn) for _ in range(layers)])
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        rel = self.rel(0, tokens.size(1), x.dtype)
        for block in self.blocks:
            x = block.ffn(x + block.retention.parallel(block.norm1(x), rel, self.rel.gamma))
        return self.lm_head(self.norm(x))

    def forward_chunk(self, tokens, start, states):
        x = self.embed(tokens)
        rel = self.rel(start, tokens.size(1), x.dtype)
        new_states = []
        for block, state in zip(self.blocks, states):
            y, state = block.retention.chunkwise(block.norm1(x), rel, self.rel.gamma, state)
            x = block.ffn(x + y)
            new_states.append(state)
        return self.lm_head(self.norm(x)), new_states


def recurrent(model, chunks):
    start, states, outputs = 0, [None] * len(model.blocks), []
    for chunk in chunks:
        logits, states = model.forward_chunk(chunk, start, states)
        start += chunk.size(1)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="RetNet",
    build=lambda c: RetNet(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=recurrent,
    declares={
        "causal": True,
        "positions": "other",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": False,
        "tied": False,
        "structure": "other",
    },
)
