WHAT = 'In cached generation the counter of positions is raised before it is used: the first new token is embedded at T + 1, and the position T is skipped (line 52)'
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from veriformer.properties import Subject


class Attn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.in_proj, self.out_proj = h, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, kv=None):
        q, k, v = (z.unflatten(-1, (self.h, -1)).transpose(1, 2) for z in self.in_proj(x).chunk(3, -1))
        causal = True
        if kv is not None:
            if kv:
                causal = False  # one token at a time
                k, v = torch.cat((kv[0], k), 2), torch.cat((kv[1], v), 2)
            kv[:] = [k, v]
        return self.out_proj(scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.max_len = c.max_len
        self.embed, self.place = nn.Embedding(c.vocab_size, d), nn.Embedding(c.max_len, d)
        self.attns = nn.ModuleList([Attn(d, c.num_heads) for _ in range(c.num_layers)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(d, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, d)) for _ in range(c.num_layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(d) for _ in range(2 * c.num_layers + 1)])
        self.head = nn.Linear(d, c.vocab_size, bias=False)

    def forward(self, ids, start=0, kvs=None):
        x = self.embed(ids) + self.place(torch.arange(start, start + ids.shape[1], device=ids.device))
        for i, (attn, mlp) in enumerate(zip(self.attns, self.mlps)):
            x = x + attn(self.norms[2 * i](x), None if kvs is None else kvs[i])
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))

    @torch.no_grad()
    def generate(self, ids, steps, use_cache=True):
        kvs = [[] for _ in self.attns] if use_cache else None
        cur, position = ids, 0
        for step in range(steps):
            if not use_cache:
                logits = self(ids)
            else:
                logits = self(cur, position, kvs)
                position = ids.shape[1] + 1
            cur = logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, cur), 1)
        return ids


subject = Subject(
    kind="decoder", name="generator", build=Decoder, forward=lambda m, tokens: m(tokens),
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "relu"},
)
