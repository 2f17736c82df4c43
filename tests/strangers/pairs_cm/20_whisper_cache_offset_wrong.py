"""Speech-to-text style encoder-decoder: cached keys and values lie in one tuple a layer, cross-attention's first."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(start, length, width, like):
    place = torch.arange(start, start + length, device=like.device, dtype=torch.float64)
    rate = 10000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float64) / width)
    angle = place[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :width].to(like.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x):
        return self.split(self.k(x)), self.split(self.v(x))

    def forward(self, x, k, v, seen=None):
        q = self.split(self.q(x))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if seen is None:
            weights = scores.softmax(-1)
        else:
            weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~seen, 0.0)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def mlp(dim, hidden):
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim, heads), mlp(dim, hidden)

    def forward(self, x, seen):
        h = self.n1(x)
        x = x + self.attn(h, *self.attn.keys_values(h), seen)
        return x + self.mlp(self.n2(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.cross, self.mlp = Attention(dim, heads), Attention(dim, heads), mlp(dim, hidden)

    def forward(self, x, memory, memory_seen, target_mask, past=None):
        h = self.n1(x)
        k, v = self.attn.keys_values(h)
        if past is None:
            cross_k, cross_v = self.cross.keys_values(memory)
        else:
            cross_k, cross_v = past[0], past[1]
            k, v = torch.cat((past[2], k), 2), torch.cat((past[3], v), 2)
        T, S = x.shape[1], k.shape[2]
        seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        if target_mask is not None:
            seen = seen & target_mask[:, None, None, :]
        x = x + self.attn(h, k, v, seen)
        x = x + self.cross(self.n2(x), cross_k, cross_v, memory_seen)
        return x + self.mlp(self.n3(x)), (cross_k, cross_v, k, v)


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, hidden) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads, hidden) for _ in range(layers))
        self.n_enc, self.n_dec = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def encode(self, source, seen=None):
        x = self.source(source)
        x = x + sinusoids(0, x.shape[1], x.shape[2], x)
        for layer in self.encoder:
            x = layer(x, seen)
        return self.n_enc(x)

    def decode(self, target, memory, memory_seen=None, target_mask=None, past=None):
        x = self.target(target)
        offset = 0 if past is None else past[0][0].shape[2]
        x = x + sinusoids(offset, x.shape[1], x.shape[2], x)
        present = []
        for i, layer in enumerate(self.decoder):
            x, kept = layer(x, memory, memory_seen, target_mask, None if past is None else past[i])
            present.append(kept)
        return self.head(self.n_dec(x)), present


def forward(model, source, target, source_mask=None, target_mask=None):
    seen = None if source_mask is None else source_mask[:, None, None, :]
    return model.decode(target, model.encode(source, seen), seen, target_mask)[0]


def cached(model, source, chunks):
    memory, past, outputs = model.encode(source), None, []
    for chunk in chunks:
        out, past = model.decode(chunk, memory, past=past)
        outputs.append(out)
    return outputs


subject = Subject(
    kind="encoder_decoder",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=forward,
    cache=cached,
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "padding_side": "right",
        "norm_placement": "pre",
        "norm": "layer",
        "activation": "gelu",
    },
)

WHAT = 'The position of a cached step is read from the first tensor of the tuple, the keys of the cross-attention: it is the length of the source, not the number of target tokens decoded so far (line 95).'
