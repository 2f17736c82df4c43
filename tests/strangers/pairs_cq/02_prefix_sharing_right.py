"""Prefill with prefix sharing: blocks of tokens that several requests have in common are computed once."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

BLOCK = 2


class Layer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc, self.proj = nn.Linear(width, inner), nn.Linear(inner, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, past):
        """x [R, t, D] of the blocks that must be computed, past k and v [R, H, s, d] of what lies before them."""
        h = self.n1(x)
        fresh = self.split(self.k(h)), self.split(self.v(h))
        keys, values = (torch.cat(pieces, dim=2) for pieces in zip(past, fresh))
        new, every = x.size(1), keys.size(2)
        seen = torch.ones(new, every, dtype=torch.bool, device=x.device).tril(every - new)
        y = F.scaled_dot_product_attention(self.split(self.q(h)), keys, values, attn_mask=seen)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.proj(F.relu(self.fc(self.n2(x)))), fresh


class Engine(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.pos = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size)
        self.heads, self.width = c.num_heads, c.d_model // c.num_heads

    def forward(self, tokens):
        requests, length = tokens.shape
        empty = self.tok.weight.new_zeros(requests, self.heads, 0, self.width)
        past = [(empty, empty) for _ in self.layers]
        chain = [()] * requests  # what names the blocks before this one
        outputs = []
        for start in range(0, length, BLOCK):
            block = tokens[:, start : start + BLOCK]
            chain = [(parent, tuple(row)) for parent, row in zip(chain, block.tolist())]
            number, first = {}, []
            for request, name in enumerate(chain):
                if name not in number:
                    number[name] = len(first)
                    first.append(request)
            owner = torch.tensor([number[name] for name in chain], device=tokens.device)
            first = torch.tensor(first, device=tokens.device)
            places = torch.arange(start, start + block.size(1), device=tokens.device)
            x = self.tok(block[first]) + self.pos(places)
            for index, layer in enumerate(self.layers):
                k, v = past[index]
                x, (new_k, new_v) = layer(x, (k[first], v[first]))
                past[index] = torch.cat((k, new_k[owner]), 2), torch.cat((v, new_v[owner]), 2)
            outputs.append(self.norm(x)[owner])
        return self.lm_head(torch.cat(outputs, dim=1))


subject = Subject(
    kind="decoder",
    build=Engine,
    forward=lambda model, tokens: model(tokens),
    declares={"causal": True, "positions": "learned", "norm_placement": "pre"},
)
