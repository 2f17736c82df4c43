"""Streaming decoder: a sliding window and attention sinks, kept at decoding in a ring of fixed size."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

SINKS, WINDOW = 2, 4


class Ring:
    def __init__(self):
        self.k = self.v = None

    def put(self, k, v, position):
        """k, v [B, H, 1, K]; gives all that is kept."""
        slot = position % (SINKS + WINDOW)
        if self.k is None:
            self.k, self.v = k, v
        elif slot >= self.k.shape[2]:
            self.k, self.v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        else:
            at = torch.tensor([slot], device=k.device)
            self.k, self.v = self.k.index_copy(2, at, k), self.v.index_copy(2, at, v)
        return self.k, self.v


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_m = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.fc, self.proj = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, ring=None, position=None):
        h = self.ln_a(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if ring is not None:
            k, v = ring.put(k, v, position)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if ring is None:
            i = torch.arange(x.shape[1], device=x.device)
            back = i[:, None] - i[None, :]
            seen = (back >= 0) & ((back < WINDOW) | (i[None, :] < SINKS))
            scores = scores.masked_fill(~seen, -torch.inf)
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.proj(F.gelu(self.fc(self.ln_m(x))))


class StreamingLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.ln, self.out = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, rings=None, position=0):
        x = self.tok(tokens) + self.pos(torch.arange(position, position + tokens.shape[1], device=tokens.device))
        for i, layer in enumerate(self.layers):
            x = layer(x) if rings is None else layer(x, rings[i], position)
        return self.out(self.ln(x))


def stream(model, chunks):
    rings, tokens = [Ring() for _ in model.layers], torch.cat(list(chunks), 1)
    return torch.cat([model(tokens[:, t : t + 1], rings, t) for t in range(tokens.shape[1])], 1)


subject = Subject(
    kind="decoder",
    build=lambda c: StreamingLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=stream,
    declares={"positions": "learned", "window": WINDOW, "sink_tokens": SINKS, "norm_placement": "pre"},
)

WHAT = 'The ring runs over all slots, those of the sinks among them: once it is full the sinks are overwritten, and older tokens than the window stay (line 17).'
