"""An encoder-decoder; the decoder has a cache that takes chunks."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(start, length, d, like):
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    at = torch.arange(start, start + length, dtype=wide, device=like.device)[:, None]
    rate = 10000.0 ** (-torch.arange(0, d, 2, dtype=wide, device=like.device) / d)
    table = torch.zeros(length, d, dtype=wide, device=like.device)
    table[:, 0::2], table[:, 1::2] = (at * rate).sin(), (at * rate).cos()[:, : d // 2]
    return table.to(like.dtype)


class Heads(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, source=None, mask=None, causal=False, past=None):
        source = x if source is None else source
        q, k, v = (f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, t in ((self.q, x), (self.k, source), (self.v, source)))
        if past is not None:
            if past:
                k, v = torch.cat([past["k"], k], 2), torch.cat([past["v"], v], 2)
            past["k"], past["v"] = k, v
        T, S = q.shape[2], k.shape[2]
        if mask is not None:
            mask = mask.bool()[:, None, None, :].expand(-1, 1, T, -1)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device)
        if causal and T > 1:
            allowed = allowed.tril()
        if mask is not None:  # a query that would see nothing sees what its place allows, so that nothing is nan
            mask = mask & allowed
            allowed = mask | (allowed & ~mask.any(-1, keepdim=True))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        d = c.d_model
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Heads(d, c.num_heads)
        if cross:
            self.nc, self.cross = nn.LayerNorm(d), Heads(d, c.num_heads)
        self.up, self.down = nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d)

    def forward(self, x, mask=None, memory=None, memory_mask=None, past=None):
        causal = memory is not None
        x = x + self.attention(self.n1(x), mask=mask, causal=causal, past=past)
        if causal:
            x = x + self.cross(self.nc(x), memory, memory_mask)
        return x + self.down(F.relu(self.up(self.n2(x))))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d = c.d_model
        self.src, self.tgt = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList([Layer(c, False) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList([Layer(c, True) for _ in range(c.num_layers)])
        self.ne, self.nd = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def enter(self, table, tokens, start=0):
        x = table(tokens) * self.d**0.5
        return x + sinusoids(start, tokens.shape[1], self.d, x)

    def encode(self, source, mask=None):
        x = self.enter(self.src, source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.ne(x)

    def decode(self, target, memory, source_mask=None, target_mask=None, start=0, pasts=None):
        x = self.enter(self.tgt, target, start)
        for n, layer in enumerate(self.decoder):
            x = layer(x, target_mask, memory, source_mask, pasts[n] if pasts else None)
        return self.head(self.nd(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)

    def cached(self, source, chunks):
        memory, pasts, start, out = self.encode(source), [{} for _ in self.decoder], 0, []
        for chunk in chunks:
            out.append(self.decode(chunk, memory, start=start, pasts=pasts))
            start += chunk.shape[1]
        return out


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq with chunks",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.cached(source, chunks),
    declares={
        "positions": "sinusoidal",
        "norm_placement": "pre",
        "norm": "layer",
        "activation": "relu",
        "embedding_scale": True,
        "padding_side": "right",
        "tied": False,
    },
)

WHAT = (
    'The causal mask is aligned at the top left: with keys in the cache a chunk of several tokens sees the first keys alone; whole sequences and single steps are right'
    ' (line 36).'
)
