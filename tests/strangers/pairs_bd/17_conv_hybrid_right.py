"""A hybrid decoder: each layer a short causal convolution, attention without positions, SwiGLU; with a decoding state."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

KERNEL = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class ShortConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.in_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.conv = nn.Conv1d(dim, dim, KERNEL, groups=dim)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, state=None):
        u, z = self.in_proj(x).chunk(2, dim=-1)
        past = u.new_zeros(u.shape[0], KERNEL - 1, u.shape[2]) if state is None else state
        history = torch.cat([past, u], dim=1)
        y = F.silu(self.conv(history.transpose(1, 2)).transpose(1, 2))
        new_state = history[:, -(KERNEL - 1) :]
        return self.out_proj(y * F.silu(z)), new_state


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, state=None):
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], dim=2), torch.cat([state[1], v], dim=2)
        t, s = q.shape[2], k.shape[2]
        seen = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.wo(y.transpose(1, 2).flatten(2)), (k, v)


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm_c, self.norm_a, self.norm_f = RMSNorm(dim), RMSNorm(dim), RMSNorm(dim)
        self.mixer, self.attn = ShortConv(dim), Attention(dim, heads)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, state=(None, None)):
        y, conv_state = self.mixer(self.norm_c(x), state[0])
        x = x + y
        y, kv_state = self.attn(self.norm_a(x), state[1])
        x = x + y
        h = self.norm_f(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), (conv_state, kv_state)


class Hybrid(nn.Module):
    def __init__(self, vocab, dim, heads, hidden, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, hidden) for _ in range(depth)])
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, states=None):
        x, new_states = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            x, state = layer(x, (None, None) if states is None else states[i])
            new_states.append(state)
        return self.lm_head(self.norm(x)), new_states


def cached(model, chunks, reorder=None):
    outputs, states = [], None
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            states = [(c[reorder], (k[reorder], v[reorder])) for c, (k, v) in states]
        logits, states = model(chunk, states)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="conv-attention hybrid",
    build=lambda c: Hybrid(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda model, tokens: model(tokens)[0],
    cache=cached,
    declares={
        "causal": True,
        "positions": "other",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "tied": False,
        "output_bias": False,
        "structure": "other",
    },
)
