WHAT = "The cache's buffers are allocated in bfloat16 whatever the model's precision, so cached keys and values lose 16 bits of a float32 model (line 23)."
"""ALiBi decoder with a preallocated cache; every tensor lives in the precision of the model."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def alibi_slopes(heads):
    return torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])


class Cache(dict):
    def __init__(self, max_len):
        super().__init__()
        self.max_len, self.pos = max_len, 0

    def store(self, key, new):
        if key not in self:
            b, h, _, c = new.shape
            self[key] = torch.zeros(b, h, self.max_len, c, dtype=torch.bfloat16, device=new.device)
        stop = self.pos + new.shape[2]
        self[key][:, :, self.pos : stop].copy_(new)
        return self[key][:, :, :stop].to(new.dtype)


class AlibiBlock(nn.Module):
    def __init__(self, idx, d, h, ff):
        super().__init__()
        self.idx, self.h = idx, h
        self.ln_attn, self.ln_ff = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)
        self.register_buffer("slopes", alibi_slopes(h), persistent=False)

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q, k, v = (z.reshape(b, t, self.h, -1).transpose(1, 2) for z in self.qkv(self.ln_attn(x)).chunk(3, dim=-1))
        start = 0
        if cache is not None:
            start = cache.pos
            k = cache.store(("k", self.idx), k)
            v = cache.store(("v", self.idx), v)
        rows = torch.arange(start, start + t, device=x.device)[:, None]
        cols = torch.arange(k.shape[2], device=x.device)[None, :]
        bias = self.slopes.to(x.dtype)[:, None, None] * (cols - rows).to(x.dtype)
        bias = bias.masked_fill(cols > rows, -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].expand(b, -1, -1, -1))
        x = x + self.dense(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln_ff(x))))


class AlibiLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.max_len = c.max_len
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.h = nn.ModuleList([AlibiBlock(i, c.d_model, c.num_heads, c.d_ff) for i in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        x = self.word_embeddings(tokens)
        for block in self.h:
            x = block(x, cache)
        if cache is not None:
            cache.pos += tokens.shape[1]
        return self.lm_head(self.ln_f(x))


@torch.inference_mode()
def incremental(model, chunks):
    cache = Cache(model.max_len)
    return torch.cat([model(c, cache) for c in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="ALiBi language model",
    build=AlibiLM,
    forward=lambda m, tokens: m(tokens),
    cache=incremental,
    domain={"num_heads": (1, 2, 4)},
    declares={
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
    },
)
