import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rotate(x, offset):
    T, K = x.shape[-2:]
    inv = 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    angle = torch.arange(offset, offset + T, dtype=torch.float64)[:, None] * inv
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class KVCache:
    def __init__(self, n_layer):
        self.keys = [None] * n_layer
        self.values = [None] * n_layer

    def __len__(self):
        return 0 if self.keys[0] is None else self.keys[0].size(-2)

    def update(self, i, k, v):
        if self.keys[i] is not None:
            k = torch.cat([self.keys[i], k], -2)
            v = torch.cat([self.values[i], v], -2)
        self.keys[i], self.values[i] = k, v
        return k, v

    def reorder(self, beam_idx):
        self.keys = [k.index_select(0, beam_idx) for k in self.keys]
        self.values = [v.index_select(0, beam_idx) for v in self.values]


class Block(nn.Module):
    def __init__(self, n_embd, n_head, d_ff, i):
        super().__init__()
        if (n_embd // n_head) % 2:
            raise ValueError("the width of a head must be even")
        self.i, self.n_head = i, n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, d_ff), nn.GELU(), nn.Linear(d_ff, n_embd))

    def attend(self, x, past, cache):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, past), rotate(k, past)
        if cache is not None:
            k, v = cache.update(self.i, k, v)
        allowed = torch.ones(T, k.size(-2), dtype=torch.bool).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x, past=0, cache=None):
        x = x + self.attend(self.ln_1(x), past, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, n_embd, n_head, n_layer, d_ff):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, d_ff, i) for i in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx, cache=None):
        past = 0 if cache is None else len(cache)
        x = self.wte(idx)
        for block in self.h:
            x = block(x, past, cache)
        return self.lm_head(self.ln_f(x))


def incremental(model, chunks, reorder=None):
    cache, outputs = KVCache(len(model.h)), []
    for i, chunk in enumerate(chunks):
        outputs.append(model(chunk, cache))
        if i == 0 and reorder is not None:
            cache.reorder(torch.as_tensor(reorder))
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=incremental,
    declares={"positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)
