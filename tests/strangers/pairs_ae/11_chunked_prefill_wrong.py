WHAT = "For a chunk behind a cache the causal mask is aligned top-left (tril() of T x S) instead of bottom-right, so its query t sees the first t + 1 keys of the cache only (line 46); prefill at once and single tokens are right."
"""Grouped queries and a static cache: buffers of max_len are allocated once, prefill comes in chunks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject


class StaticKV:
    def __init__(self, layers: int, batch: int, groups: int, length: int, width: int, like: Tensor):
        self.k = [like.new_zeros(batch, groups, length, width) for _ in range(layers)]
        self.v = [like.new_zeros(batch, groups, length, width) for _ in range(layers)]
        self.used = 0

    def update(self, layer: int, k: Tensor, v: Tensor):
        end = self.used + k.size(2)
        self.k[layer][:, :, self.used : end] = k
        self.v[layer][:, :, self.used : end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]


class GroupedAttention(nn.Module):
    def __init__(self, d: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, d // heads
        self.q_proj = nn.Linear(d, heads * self.width, bias=False)
        self.k_proj = nn.Linear(d, groups * self.width, bias=False)
        self.v_proj = nn.Linear(d, groups * self.width, bias=False)
        self.o_proj = nn.Linear(heads * self.width, d, bias=False)

    def forward(self, x: Tensor, layer: int, kv: StaticKV | None) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.heads, self.width).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.groups, self.width).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.groups, self.width).transpose(1, 2)
        if kv is not None:
            k, v = kv.update(layer, k, v)
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        S = k.size(2)
        if T == 1 or kv is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        else:
            below = torch.ones(T, S, dtype=torch.bool, device=x.device).tril()
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=below)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(c.d_model, eps=1e-5), nn.RMSNorm(c.d_model, eps=1e-5)
        self.attn = GroupedAttention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.gate_up = nn.Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, layer, kv):
        x = x + self.attn(self.input_norm(x), layer, kv)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class GroupedDecoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def new_cache(self, batch: int) -> StaticKV:
        c = self.c
        return StaticKV(c.num_layers, batch, c.num_key_value_heads, c.max_len, c.d_model // c.num_heads, self.norm.weight)

    def forward(self, ids: Tensor, kv: StaticKV | None = None) -> Tensor:
        start = 0 if kv is None else kv.used
        x = self.tokens(ids) + self.places(torch.arange(start, start + ids.size(1), device=ids.device))
        for n, layer in enumerate(self.layers):
            x = layer(x, n, kv)
        if kv is not None:
            kv.used += ids.size(1)
        return self.lm_head(self.norm(x))


def prefill_and_decode(model, chunks):
    with torch.no_grad():
        kv = model.new_cache(chunks[0].size(0))
        return torch.cat([model(chunk, kv) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="grouped queries, static cache",
    build=GroupedDecoder,
    forward=lambda m, tokens: m(tokens),
    cache=prefill_and_decode,
    declares={
        "positions": "learned",
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
    },
)
