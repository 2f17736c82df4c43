"""A small Gemma: RMSNorm multiplies by 1 + weight; checkpoints of before hold the whole gain under another name."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "When a checkpoint is loaded, 1 is subtracted from the gains of new checkpoints too, not of old ones alone."
CAUSE = (
    "The norm's _load_from_state_dict renames the old key and then shifts whatever lies under the new one: a state dict "
    "that the model has saved itself comes back with every RMSNorm gain smaller by 1."
)


class ZeroCentredRMSNorm(nn.Module):
    """x / rms(x) * (1 + offset). Until version 0.3 `gain` = 1 + offset was stored."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.offset = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        kept = x.to(torch.promote_types(x.dtype, torch.float32))
        kept = kept * torch.rsqrt(kept.pow(2).mean(-1, keepdim=True) + self.eps)
        return (kept * (1.0 + self.offset.to(kept.dtype))).to(x.dtype)

    def convert(self, state_dict, prefix):
        old, new = prefix + "gain", prefix + "offset"
        if old in state_dict:
            state_dict[new] = state_dict.pop(old) - 1.0

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        self.convert(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class ZeroCentredRMSNormShifted(ZeroCentredRMSNorm):
    def convert(self, state_dict, prefix):
        old, new = prefix + "gain", prefix + "offset"
        if old in state_dict:
            state_dict[new] = state_dict.pop(old)
        if new in state_dict:
            state_dict[new] = state_dict[new] - 1.0


def rotate(x):
    """x [B, H, T, K] by its place; channel i goes with i + K/2."""
    kept = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=kept) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=kept)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class GemmaLayer(nn.Module):
    def __init__(self, norm, dim, heads, kv_heads, hidden):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("the width of a head must be even")
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, heads * self.width, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(heads * self.width, dim, bias=False)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.input_layernorm, self.post_attention_layernorm = norm(dim), norm(dim)

    def forward(self, x):
        B, T, _ = x.shape
        y = self.input_layernorm(x)
        q = rotate(self.q_proj(y).view(B, T, self.heads, self.width).transpose(1, 2))
        k = rotate(self.k_proj(y).view(B, T, self.kv_heads, self.width).transpose(1, 2))
        v = self.v_proj(y).view(B, T, self.kv_heads, self.width).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.gelu(self.gate_proj(y), approximate="tanh") * self.up_proj(y))


class Gemma(nn.Module):
    def __init__(self, norm, vocab, dim, layers, heads, kv_heads, hidden):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(GemmaLayer(norm, dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.lm_head = norm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def subject(norm):
    return Subject(
        kind="decoder",
        name="small Gemma",
        build=lambda c: Gemma(
            norm, c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.num_key_value_heads, c.d_ff
        ),
        forward=lambda m, tokens: m(tokens),
        declares={"positions": "rotary", "layout": "halves"},
    )


right, wrong = subject(ZeroCentredRMSNorm), subject(ZeroCentredRMSNormShifted)
