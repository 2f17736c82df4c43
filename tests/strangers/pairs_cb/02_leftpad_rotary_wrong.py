WHAT = "With padding on the left a cached step numbers its tokens by the length of the cache (`torch.arange(past, past + t)` in Llama.step), while the prompt was numbered by the mask's running sum: rotary distances grow by the padding."
"""Llama style: rotary, SwiGLU, RMSNorm, padding masks and a cache."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary(x, position_ids, base=10000.0):
    d = x.shape[-1]
    inv = base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = position_ids[:, None, :, None].double() * inv
    cos, sin = (torch.cat((f, f), -1).to(x.dtype) for f in (angle.cos(), angle.sin()))
    return x * cos + rotate_half(x) * sin


class LlamaLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.heads, self.kv_heads, self.d_head = c.num_heads, c.num_key_value_heads, d // c.num_heads
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * self.d_head, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * self.d_head, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(d, c.d_ff, bias=False), nn.Linear(d, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, d, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)

    def forward(self, x, position_ids, allowed, past):
        B, T, _ = x.shape
        h = self.input_layernorm(x)
        q = apply_rotary(self.q_proj(h).view(B, T, self.heads, -1).transpose(1, 2), position_ids)
        k = apply_rotary(self.k_proj(h).view(B, T, self.kv_heads, -1).transpose(1, 2), position_ids)
        v = self.v_proj(h).view(B, T, self.kv_heads, -1).transpose(1, 2)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        n = self.heads // self.kv_heads
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), attn_mask=allowed[:, None])
        x = x + self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h)), (k, v)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        if (c.d_model // c.num_heads) % 2:
            raise ValueError("heads must be even")
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([LlamaLayer(c) for _ in range(c.num_layers)])
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def step(self, tokens, mask, past):
        """`mask` [B, past + t] of everything so far."""
        t, total = tokens.shape[1], mask.shape[1]
        before = total - t
        i, j = torch.arange(before, total)[:, None], torch.arange(total)
        allowed = (j <= i) & mask[:, None, :] | (j == i)  # a padded query sees itself: no empty rows
        if past is None:
            position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)
        else:
            position_ids = torch.arange(before, before + t).expand(tokens.shape[0], t)
        x, present = self.embed_tokens(tokens), []
        for n, layer in enumerate(self.layers):
            x, kv = layer(x, position_ids, allowed, past and past[n])
            present.append(kv)
        return self.lm_head(self.norm(x)), present


def forward(model, tokens, attention_mask=None):
    mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    return model.step(tokens, mask, None)[0]


def cache(model, chunks, attention_mask=None, reorder=None):
    B, total = chunks[0].shape[0], sum(x.shape[1] for x in chunks)
    mask = torch.ones(B, total, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    out, past, done = [], None, 0
    for n, chunk in enumerate(chunks):
        if n == 1 and reorder is not None:
            past = [(k.index_select(0, reorder), v.index_select(0, reorder)) for k, v in past]
            mask = mask.index_select(0, reorder)
        done += chunk.shape[1]
        logits, past = model.step(chunk, mask[:, :done], past)
        out.append(logits)
    return out


subject = Subject(
    kind="decoder",
    name="llama",
    build=Llama,
    forward=forward,
    cache=cache,
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True,
              "activation": "swiglu", "bias": False, "grouped_queries": True, "padding_side": "both"},
)
