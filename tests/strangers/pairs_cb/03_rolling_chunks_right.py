"""Mistral-like sliding window with ALiBi; cache of bounded size."""
import torch
import torch.nn as nn

from veriformer.properties import Subject

WINDOW = 3


class Layer(nn.Module):
    def __init__(self, dim, n_heads, hidden):
        super().__init__()
        self.n_heads = n_heads
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        self.n1, self.n2 = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        slopes = 2.0 ** (-8.0 * torch.arange(1, n_heads + 1) / n_heads)
        self.register_buffer("slopes", slopes[:, None, None], persistent=False)

    def forward(self, x, at, state):
        """at [t]: absolute positions; state: (positions [s], k, v [B, s, H, K]) or None."""
        b, t, d = x.shape
        q, k, v = self.wqkv(self.n1(x)).view(b, t, 3, self.n_heads, -1).unbind(2)
        where = at
        if state is not None:
            where = torch.cat((state[0], at))
            k, v = torch.cat((state[1], k), 1), torch.cat((state[2], v), 1)
        distance = at[:, None] - where
        scores = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5 - self.slopes.to(x.dtype) * distance
        scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), float("-inf"))
        y = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v).reshape(b, t, d)
        x = x + self.wo(y)
        x = x + self.w2(torch.relu(self.w1(self.n2(x))))
        return x, (where[-WINDOW:], k[:, -WINDOW:], v[:, -WINDOW:])


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.out = nn.RMSNorm(c.d_model, eps=1e-6), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def run(self, tokens, start, states):
        x, new = self.emb(tokens), []
        at = torch.arange(start, start + tokens.shape[1])
        for layer, state in zip(self.layers, states):
            x, s = layer(x, at, state)
            new.append(s)
        return self.out(self.norm(x)), new

    def forward(self, tokens):
        return self.run(tokens, 0, [None] * len(self.layers))[0]


def cache(model, chunks, reorder=None):
    states, start, outputs = [None] * len(model.layers), 0, []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            states = [(p, k[reorder], v[reorder]) for p, k, v in states]
        y, states = model.run(chunk, start, states)
        start += chunk.shape[1]
        outputs.append(y)
    return torch.cat(outputs, 1) if reorder is None else outputs


subject = Subject(
    kind="decoder",
    name="rolling window",
    build=Model,
    forward=lambda m, tokens: m(tokens),
    cache=cache,
    domain={"num_heads": (1, 2, 4)},
    declares={"causal": True, "positions": "alibi", "window": WINDOW, "norm": "rms", "norm_placement": "pre", "activation": "relu", "bias": False},
)
