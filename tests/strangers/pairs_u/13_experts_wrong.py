WHAT = "the gates are flattened time first, the tokens batch first: with more than one sample a token is sent to the experts of another one (line 25)"
# An encoder with a mixture of experts (top 2, no capacity) in place of each feed-forward network; ALiBi both ways.
import torch
from torch import nn

from veriformer.properties import Subject


class Experts(nn.Module):
    def __init__(self, width, hidden, count=4, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) / hidden**0.5)

    def route(self, x):
        """[B, T, D] -> [B, T, E], zero where an expert is not chosen; the rest sums to 1."""
        probabilities = self.gate(x).softmax(-1)
        top, index = probabilities.topk(self.chosen, dim=-1)
        return torch.zeros_like(probabilities).scatter(-1, index, top / top.sum(-1, keepdim=True))

    def forward(self, x):
        tokens = x.reshape(-1, x.size(-1))
        gates = self.route(x).transpose(0, 1).reshape(len(tokens), -1)
        mixed = torch.zeros_like(tokens)
        for expert in range(gates.size(-1)):
            rows = gates[:, expert].nonzero().squeeze(-1)
            y = torch.relu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            mixed = mixed.index_add(0, rows, y * gates[rows, expert, None])
        return mixed.view_as(x)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.decay = nn.Parameter(torch.linspace(-1.0, 1.0, heads))

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.size(1), device=x.device, dtype=x.dtype)
        near = -(place[:, None] - place).abs() * self.decay.exp()[:, None, None]
        scores = q @ k.mT * q.size(-1) ** -0.5 + near
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.experts = Attention(width, heads), Experts(width, hidden)

    def forward(self, x, mask):
        x = x + self.attention(self.first(x), mask)
        return x + self.experts(self.second(x))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.table = nn.Embedding(c.vocab_size, c.d_model)
        self.stack = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.last = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.table(tokens)
        for layer in self.stack:
            x = layer(x, attention_mask)
        return self.last(x)


subject = Subject(
    kind="encoder",
    name="encoder of experts",
    build=Encoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    router=lambda model, x: model.stack[0].experts.route(x),
    declares={"norm_topk_prob": True, "norm_placement": "pre"},
)
