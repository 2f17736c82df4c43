"""Greedy decoding with drafts looked up in the text so far (prompt lookup), verified in one forward each."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

DRAFT = 3


class Cache:
    def __init__(self, layers):
        self.kv = [None] * layers

    def __len__(self):
        return 0 if self.kv[0] is None else self.kv[0][0].size(2)

    def put(self, layer, k, v):
        if self.kv[layer] is not None:
            k, v = torch.cat((self.kv[layer][0], k), 2), torch.cat((self.kv[layer][1], v), 2)
        self.kv[layer] = k, v
        return k, v

    def cut(self, length):
        self.kv = [(k[:, :, :length], v[:, :, :length]) for k, v in self.kv]


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList()
        for _ in range(c.num_layers):
            layer = nn.Module()
            layer.norm1, layer.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
            layer.qkv = nn.Linear(c.d_model, 3 * c.d_model)
            layer.out = nn.Linear(c.d_model, c.d_model)
            layer.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
            self.layers.append(layer)
        self.norm = nn.LayerNorm(c.d_model)
        self.slopes = [2.0 ** (-8.0 * (h + 1) / c.num_heads) for h in range(c.num_heads)]

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else len(cache)
        x = self.emb(tokens)
        b, t, _ = x.shape
        i = torch.arange(start, start + t, device=x.device)[:, None]
        j = torch.arange(start + t, device=x.device)[None, :]
        slopes = torch.tensor(self.slopes, dtype=x.dtype, device=x.device)[:, None, None]
        bias = (slopes * (j - i)).masked_fill(j > i, -torch.inf)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.qkv(layer.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            if cache is not None:
                k, v = cache.put(index, k, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(b, -1, -1, -1))
            x = x + layer.out(y.transpose(1, 2).reshape(b, t, -1))
            x = x + layer.mlp(layer.norm2(x))
        return self.norm(x) @ self.emb.weight.T


def lookup(text, most):
    """What followed the last token where it stood before."""
    for place in range(len(text) - 2, -1, -1):
        if text[place] == text[-1]:
            return text[place + 1 : place + 1 + min(DRAFT, most)]
    return []


def speculate(model, prompt, steps):
    text, goal = list(prompt), len(prompt) + steps
    cache = Cache(len(model.layers))
    if len(text) > 1:
        model(torch.tensor([text[:-1]], device=model.emb.weight.device), cache)
    while len(text) < goal:
        draft = lookup(text, goal - len(text) - 1)
        feed = torch.tensor([text[-1:] + draft], device=model.emb.weight.device)
        best = model(feed, cache)[0].argmax(-1).tolist()
        good = 0
        while good < len(draft) and draft[good] == best[good]:
            good += 1
        text += draft[:good] + [best[good]]
        cache.cut(len(text) - 1)  # keys of drafts that were refused are dropped
    return text


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if use_cache:
        return torch.tensor([speculate(model, row, steps) for row in tokens.tolist()], device=tokens.device)
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens


subject = Subject(
    kind="decoder",
    build=Model,
    forward=lambda model, tokens: model(tokens),
    generate=generate,
    declares={"causal": True, "positions": "alibi", "slopes": "geometric", "tied": True},
)
