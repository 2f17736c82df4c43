WHAT = "speculative generate crops the cache to len(seq) in place of len(seq) - 1 after a verification, so behind a rejected draft one stale rejected key/value stays and all later positions are one too far"
import math
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject


def sinusoid(positions, width, dtype):
    half = (width + 1) // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=positions.device, dtype=torch.float64) * 2 / width)
    angles = positions[:, None].double() * rates
    return torch.cat([angles.sin(), angles.cos()[:, : width - half]], -1).to(dtype)


class Cache:
    def __init__(self, layers):
        self.kv = [None] * layers

    def __len__(self):
        return 0 if self.kv[0] is None else self.kv[0].shape[3]

    def extend(self, layer, kv):
        self.kv[layer] = kv if self.kv[layer] is None else torch.cat([self.kv[layer], kv], 3)
        return self.kv[layer]

    def crop(self, length):
        self.kv = [kv[:, :, :, :length] for kv in self.kv]


class Block(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.index, self.h = index, c.num_heads
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, cache):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.extend(self.index, torch.stack([k, v]))
        S = k.shape[2]
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        return x + self.ff(self.n2(x))


class LM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, ids, cache=None):
        start = 0 if cache is None else len(cache)
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.emb(ids) + sinusoid(positions, self.emb.weight.shape[1], self.emb.weight.dtype)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))


def lookup(seq, count):
    """A draft from the sequence itself: what followed the last token when it stood there before."""
    for i in range(len(seq) - 2, -1, -1):
        if seq[i] == seq[-1]:
            return seq[i + 1 : i + 1 + count]
    return seq[:count]


def speculate(model, row, steps, width=3):
    seq, end = row.tolist(), row.numel() + steps
    cache = Cache(len(model.blocks))
    if len(seq) > 1:
        model(row[None, :-1], cache)
    while len(seq) < end:
        draft = lookup(seq, min(width, end - len(seq) - 1))
        logits = model(torch.tensor([[seq[-1], *draft]], device=row.device), cache)
        chosen = logits[0].argmax(-1).tolist()
        good = 0
        while good < len(draft) and draft[good] == chosen[good]:
            good += 1
        seq += draft[:good] + [chosen[good]]
        cache.crop(len(seq))
    return torch.tensor(seq, device=row.device)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if use_cache:
        return torch.stack([speculate(model, row, steps) for row in tokens])
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


subject = Subject(kind="decoder", build=LM, forward=lambda m, tokens: m(tokens), generate=generate,
                  declares={"positions": "sinusoidal", "layout": "halves", "norm_placement": "pre", "norm": "layer", "activation": "relu"})
