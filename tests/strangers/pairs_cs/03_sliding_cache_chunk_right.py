"""A Mistral-like decoder: grouped heads, sliding window, and a rolling cache that never holds more than it needs."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class SlidingAttention(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.d = heads, groups, width // heads
        self.q_proj = nn.Linear(width, heads * self.d, bias=False)
        self.k_proj = nn.Linear(width, groups * self.d, bias=False)
        self.v_proj = nn.Linear(width, groups * self.d, bias=False)
        self.o_proj = nn.Linear(heads * self.d, width, bias=False)

    def forward(self, x, start, past):
        B, n, _ = x.shape
        q = self.q_proj(x).view(B, n, self.heads, self.d).transpose(1, 2)
        k = self.k_proj(x).view(B, n, self.groups, self.d).transpose(1, 2)
        v = self.v_proj(x).view(B, n, self.groups, self.d).transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            k, v = k[:, :, -(n + WINDOW - 1) :], v[:, :, -(n + WINDOW - 1) :]
        S = k.shape[2]
        q_pos = torch.arange(start, start + n, device=x.device)[:, None]
        k_pos = torch.arange(start + n - S, start + n, device=x.device)[None]
        allowed = (k_pos <= q_pos) & (k_pos > q_pos - WINDOW)
        rep = self.heads // self.groups
        scores = q @ k.repeat_interleave(rep, 1).transpose(-1, -2) / self.d**0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        y = scores.softmax(-1) @ v.repeat_interleave(rep, 1)
        return self.o_proj(y.transpose(1, 2).reshape(B, n, -1)), (k[:, :, -WINDOW:], v[:, :, -WINDOW:])


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.self_attn = SlidingAttention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.gate_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.up_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, start, past):
        y, past = self.self_attn(self.input_layernorm(x), start, past)
        x = x + y
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), past


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.norm, self.lm_head = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, start=0, past=None):
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        kept = []
        for i, layer in enumerate(self.layers):
            x, new = layer(x, start, None if past is None else past[i])
            kept.append(new)
        return self.lm_head(self.norm(x)), kept


def cached(model, chunks):
    outputs, start, past = [], 0, None
    for chunk in chunks:
        y, past = model(chunk, start, past)
        start += chunk.shape[1]
        outputs.append(y)
    return outputs


subject = Subject(
    kind="decoder",
    name="sliding-window decoder",
    build=Decoder,
    forward=lambda model, tokens: model(tokens)[0],
    cache=cached,
    declares={"positions": "learned", "window": WINDOW, "norm": "rms", "norm_placement": "pre", "activation": "swiglu"},
)
