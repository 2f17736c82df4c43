import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def sinusoid(pos, d):
    rate = 10000.0 ** (-torch.arange(0, d, 2, device=pos.device, dtype=pos.dtype) / d)
    a = pos[..., None] * rate
    return torch.stack((a.sin(), a.cos()), -1).flatten(-2)[..., :d]

class GPT(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        d, self.h, self.bug = c.d_model, c.num_heads, bug
        self.wte = nn.Embedding(c.vocab_size, d)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "ln_1": nn.LayerNorm(d), "c_attn": nn.Linear(d, 3 * d), "c_proj": nn.Linear(d, d),
            "ln_2": nn.LayerNorm(d), "fc": nn.Linear(d, c.d_ff), "fc_proj": nn.Linear(c.d_ff, d),
        }) for _ in range(c.num_layers))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, c.vocab_size)

    def forward(self, tokens, mask=None, cache=None):
        """`cache`, a dictionary, is filled in place; the mask counts the cached tokens too."""
        cache = {} if cache is None else cache
        n, T = cache.get("n", 0), tokens.shape[1]
        x = self.wte(tokens)
        x = x + sinusoid(torch.arange(n, n + T, device=x.device, dtype=x.dtype), x.shape[-1])
        ok = torch.ones(T, n + T, dtype=torch.bool, device=x.device).tril(n)[None, None]
        if mask is not None:
            ok = ok & mask[:, None, None, :]
        for i, b in enumerate(self.blocks):
            q, k, v = (y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in b["c_attn"](b["ln_1"](x)).chunk(3, -1))
            if n:
                k, v = torch.cat((cache["k", i], k), 2), torch.cat((cache["v", i], v), 2)
            cache["k", i], cache["v", i] = k, v
            s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
            x = x + b["c_proj"]((p @ v).transpose(1, 2).flatten(2))
            x = x + b["fc_proj"](F.gelu(b["fc"](b["ln_2"](x))))
        cache["n"] = n + T
        return self.lm_head(x if self.bug and n else self.ln_f(x))


def cached(m, chunks, attention_mask=None):
    cache, out = {}, []
    for chunk in chunks:
        n = cache.get("n", 0) + chunk.shape[1]
        out.append(m(chunk, None if attention_mask is None else attention_mask[:, :n], cache))
    return torch.cat(out, 1)




WHAT = 'The cached path (tokens after the first chunk) leaves out the final LayerNorm before the output projection.'
PLACE = 'final norm in the decode path of the decoder'


def make(bug):
    return Subject(
        kind="decoder",
        build=lambda c: GPT(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        cache=cached,
    )


right, wrong = make(False), make(True)
