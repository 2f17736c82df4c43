WHAT = "after a rejection the key-value cache is cropped one too late: the first rejected token's key and value stay, all that follows sees it and stands one position further on (line 101)."
"""A decoder that decodes greedily with prompt-lookup speculation: what is proposed is verified in one cached forward."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

GAMMA = 3  # tokens proposed at once


class KVCache:
    def __init__(self, layers):
        self.keys, self.values = [None] * layers, [None] * layers

    def __len__(self):
        return 0 if self.keys[0] is None else self.keys[0].shape[2]

    def append(self, layer, k, v):
        if self.keys[layer] is not None:
            k = torch.cat([self.keys[layer], k], dim=2)
            v = torch.cat([self.values[layer], v], dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def crop(self, length):
        self.keys = [k[:, :, :length] for k in self.keys]
        self.values = [v[:, :, :length] for v in self.values]


def sinusoids(start, length, width, like):
    position = torch.arange(start, start + length, dtype=torch.float64)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width, dtype=torch.float64)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)[:, : width // 2]
    return table.to(like)


class Layer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, index):
        super().__init__()
        self.index, self.num_heads = index, num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, cache):
        b, t, d = x.shape
        past = 0 if cache is None or cache.keys[self.index] is None else cache.keys[self.index].shape[2]
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.append(self.index, k, v)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        ahead = torch.ones(t, past + t, dtype=torch.bool, device=x.device).triu(past + 1)
        y = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class SpeculativeDecoder(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(Layer(d_model, num_heads, d_ff, i) for i in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        past = 0 if cache is None else len(cache)
        x = self.embed(tokens)
        x = x + sinusoids(past, tokens.shape[1], x.shape[-1], x)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(self.norm(x))

    @staticmethod
    def propose(ids, count):
        """What followed the last time that the last token was seen."""
        for i in range(len(ids) - 2, -1, -1):
            if ids[i] == ids[-1]:
                return ids[i + 1 : i + 1 + count]
        return ids[-1:] * count

    def speculate(self, ids, steps):
        goal, device = len(ids) + steps, self.embed.weight.device
        cache = KVCache(len(self.layers))
        logits = self(torch.tensor([ids], device=device), cache)
        following = int(logits[0, -1].argmax())
        while len(ids) < goal:
            ids.append(following)
            draft = self.propose(ids, min(GAMMA, goal - len(ids)))
            logits = self(torch.tensor([[following, *draft]], device=device), cache)
            picks = logits[0].argmax(-1).tolist()
            accepted = 0
            while accepted < len(draft) and picks[accepted] == draft[accepted]:
                accepted += 1
            ids += draft[:accepted]
            following = picks[accepted]
            cache.crop(len(ids) + 1)
        return ids[:goal]

    @torch.no_grad()
    def generate(self, tokens, steps, use_cache=True):
        if use_cache:
            rows = [self.speculate(row.tolist(), steps) for row in tokens]
            return torch.tensor(rows, device=tokens.device)
        for _ in range(steps):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


subject = Subject(
    kind="decoder",
    name="speculative decoder",
    build=lambda c: SpeculativeDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    generate=lambda model, tokens, steps, use_cache: model.generate(tokens, steps, use_cache),
    declares={
        "causal": True, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "activation": "relu",
    },
)
