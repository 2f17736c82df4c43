"""zoo/PR 131: sliding-window decoder (Mistral recipe) with a rolling key-value buffer."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "With a cache the keys are cut to the last `window` before a chunk of several tokens attends, not afterwards."
CAUSE = (
    "In the cached path past and new keys are concatenated and trimmed to the window of the chunk's last token, so the "
    "earlier queries of a chunk with more than one token lose keys that lie inside their own window; one token at a "
    "time and the uncached forward are right."
)


@dataclass
class MiniMistralConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    sliding_window: int = 4
    rope_theta: float = 10000.0
    trim_first: bool = False


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x, positions, theta):
    half = x.size(-1) // 2
    freqs = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions.to(torch.float64)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.width = cfg.hidden_size // cfg.num_attention_heads
        if self.width % 2:
            raise ValueError("rotary embeddings need an even head width")
        self.q_proj = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, cfg.num_key_value_heads * self.width, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, cfg.num_key_value_heads * self.width, bias=False)
        self.o_proj = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)

    def forward(self, x, start, past):
        B, T, _ = x.shape
        window = self.cfg.sliding_window
        split = lambda y: y.view(B, T, -1, self.width).transpose(1, 2)  # noqa: E731
        q_pos = k_pos = torch.arange(start, start + T, device=x.device)
        q = rotate(split(self.q_proj(x)), q_pos, self.cfg.rope_theta)
        k = rotate(split(self.k_proj(x)), k_pos, self.cfg.rope_theta)
        v = split(self.v_proj(x))
        if past is not None:
            k, v, k_pos = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2), torch.cat([past[2], k_pos])
            if self.cfg.trim_first:
                k, v, k_pos = k[:, :, -window:], v[:, :, -window:], k_pos[-window:]
        kept = (k[:, :, -window:], v[:, :, -window:], k_pos[-window:])
        gap = q_pos[:, None] - k_pos[None, :]
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(2, 3) * self.width**-0.5
        scores = scores.masked_fill((gap < 0) | (gap >= window), torch.finfo(scores.dtype).min)
        out = scores.softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1)), kept


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(cfg.hidden_size), RMSNorm(cfg.hidden_size)
        self.self_attn = Attention(cfg)
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x, start, past):
        attended, kept = self.self_attn(self.input_layernorm(x), start, past)
        x = x + attended
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), kept


class MiniMistral(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList([Block(cfg) for _ in range(cfg.num_hidden_layers)])
        self.norm = RMSNorm(cfg.hidden_size)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def forward(self, input_ids, start=0, past=None):
        x, kept = self.embed_tokens(input_ids), []
        for i, layer in enumerate(self.layers):
            x, entry = layer(x, start, None if past is None else past[i])
            kept.append(entry)
        return self.lm_head(self.norm(x)), kept


def decode(model, chunks):
    past, start, logits = None, 0, []
    for chunk in chunks:
        out, past = model(chunk, start, past)
        logits.append(out)
        start += chunk.size(1)
    return torch.cat(logits, 1)


def subject(trim_first):
    return Subject(
        kind="decoder",
        name="MiniMistral" + (" (trims first)" if trim_first else ""),
        build=lambda c: MiniMistral(
            MiniMistralConfig(
                c.vocab_size, c.d_model, c.d_ff, c.num_heads, c.num_key_value_heads, c.num_layers, trim_first=trim_first
            )
        ),
        forward=lambda m, tokens: m(tokens)[0],
        cache=decode,
        declares={"window": 4, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre",
                  "activation": "swiglu", "grouped_queries": True, "bias": False},
    )  # fmt: skip


right, wrong = subject(False), subject(True)
