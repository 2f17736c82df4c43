WHAT = 'reordering the cache for beam search copies samples within the clone on line 53, so that a later beam reads a sample that was already overwritten (reorder [1, 0] gives sample 1 twice)'
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def attend(q, k, v, ok):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~ok, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(~ok, 0.0) @ v


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x, positions):
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = positions[:, None].to(x.dtype) * inv
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class DynamicCache:
    def __init__(self):
        self.keys, self.values = {}, {}

    def length(self):
        return self.keys[0].shape[2] if self.keys else 0

    def update(self, index, k, v):
        if index in self.keys:
            k = torch.cat([self.keys[index], k], dim=2)
            v = torch.cat([self.values[index], v], dim=2)
        self.keys[index], self.values[index] = k, v
        return k, v

    @staticmethod
    def _pick(tensor, beams):
        picked = tensor.clone()
        for row, beam in enumerate(beams):
            picked[row] = picked[beam]
        return picked

    def reorder(self, beams):
        for store in (self.keys, self.values):
            for index in store:
                store[index] = self._pick(store[index], beams)


class LlamaLayer(nn.Module):
    def __init__(self, index, width, heads, kv_heads, inner):
        super().__init__()
        self.index, self.heads, self.kv_heads, self.dim = index, heads, kv_heads, width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)

    def forward(self, x, positions, ok, cache):
        h = self.input_layernorm(x)
        q = rotate(self.q_proj(h).unflatten(-1, (self.heads, self.dim)).transpose(1, 2), positions)
        k = rotate(self.k_proj(h).unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2), positions)
        v = self.v_proj(h).unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        groups = self.heads // self.kv_heads
        y = attend(q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), ok)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    def __init__(self, vocab, width, heads, kv_heads, layers, inner):
        super().__init__()
        if width // heads % 2:
            raise ValueError("rotary embeddings need an even width of a head")
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(LlamaLayer(i, width, heads, kv_heads, inner) for i in range(layers))
        self.norm, self.lm_head = RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens, attention_mask=None, cache=None):
        past = cache.length() if cache is not None else 0
        total = past + tokens.shape[1]
        positions = torch.arange(past, total, device=tokens.device)
        ok = (torch.arange(total, device=tokens.device) <= positions[:, None])[None, None]
        if attention_mask is not None:
            ok = ok & attention_mask.bool()[:, None, None, :total]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, positions, ok, cache)
        return self.lm_head(self.norm(x))


@torch.no_grad()
def cached(model, chunks, attention_mask=None, reorder=None):
    cache, outputs = DynamicCache(), []
    for number, chunk in enumerate(chunks):
        outputs.append(model(chunk, attention_mask, cache))
        if number == 0 and reorder is not None:
            beams = [int(b) for b in reorder]
            cache.reorder(beams)
            attention_mask = None if attention_mask is None else attention_mask[beams]
    return outputs


subject = Subject(
    kind="decoder",
    name="llama",
    build=lambda c: Llama(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre",
              "final_norm": True, "activation": "swiglu", "bias": False, "output_bias": False, "tied": False,
              "grouped_queries": True, "padding_side": "both"},
)
