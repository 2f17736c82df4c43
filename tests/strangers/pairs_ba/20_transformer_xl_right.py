# Transformer-XL: recurrence over segments, relative positions with two global biases, post-norm.
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RelativeAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.query, self.key, self.value, self.relative, self.output = (
            nn.Linear(dim, dim, bias=False) for _ in range(5)
        )
        self.u = nn.Parameter(0.1 * torch.randn(heads, 1, self.width))
        self.v = nn.Parameter(0.1 * torch.randn(heads, 1, self.width))

    def split(self, x):
        return x.unflatten(-1, (self.heads, self.width)).transpose(-2, -3)

    def encodings(self, length, x):
        rate = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1])
        angle = torch.arange(length, device=x.device)[:, None] * rate
        return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, : x.shape[-1]].to(x.dtype)

    def forward(self, x, memory):
        context = x if memory is None else torch.cat([memory, x], dim=1)
        T, L = x.shape[1], context.shape[1]
        q, k, v = self.split(self.query(x)), self.split(self.key(context)), self.split(self.value(context))
        r = self.split(self.relative(self.encodings(L, x)))
        distance = torch.arange(L - T, L, device=x.device)[:, None] - torch.arange(L, device=x.device)
        content = (q + self.u) @ k.transpose(-1, -2)
        place = (q + self.v) @ r.transpose(-1, -2)
        place = place.gather(-1, distance.clamp(min=0).expand(*place.shape[:2], T, L))
        scores = (content + place) * self.width**-0.5
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).flatten(2))


class XLLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention = RelativeAttention(dim, heads)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm_attention, self.norm_feed = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, memory):
        x = self.norm_attention(x + self.attention(x, memory))
        return self.norm_feed(x + self.down(F.relu(self.up(x))))


class TransformerXL(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([XLLayer(dim, heads, hidden) for _ in range(layers)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, memories=None):
        memories = memories or [None] * len(self.layers)
        x, remembered = self.embedding(tokens), []
        for layer, memory in zip(self.layers, memories):
            remembered.append(x if memory is None else torch.cat([memory, x], dim=1))
            x = layer(x, memory)
        return self.head(x), [state.detach() for state in remembered]


def segments(model, chunks):
    outputs, memories = [], None
    for chunk in chunks:
        logits, memories = model(chunk, memories)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="Transformer-XL",
    build=lambda c: TransformerXL(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=segments,
    declares={
        "causal": True,
        "positions": "relative",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "structure": "other",
    },
)
