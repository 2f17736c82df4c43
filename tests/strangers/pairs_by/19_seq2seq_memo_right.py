"""An encoder-decoder that keeps keys and values of the source while it decodes."""
import torch
from torch import nn
from torch.nn.functional import relu

from veriformer.properties import Subject

START = 0


def sinusoid(start, length, dim, like):
    rate = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
    angle = torch.arange(start, start + length, device=like.device).double()[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :dim].to(like.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.kv = heads, None
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(self, x, k, v, mask):
        q = self.split(self.q(x))
        s = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask, torch.finfo(s.dtype).min)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def self_attention(self, x, mask=None, causal=False, incremental=False):
        k, v = self.split(self.k(x)), self.split(self.v(x))
        if incremental:
            if self.kv is not None:
                k, v = torch.cat([self.kv[0], k], 2), torch.cat([self.kv[1], v], 2)
            self.kv = k, v
        if causal:
            T, S = x.shape[1], k.shape[2]
            past = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
            mask = past if mask is None else past & mask
        return self.attend(x, k, v, mask)

    def cross_attention(self, x, memory, mask=None, incremental=False):
        if not incremental:
            return self.attend(x, self.split(self.k(memory)), self.split(self.v(memory)), mask)
        same = self.kv is not None and self.kv[0].shape[0] == len(x) and self.kv[0].shape[2] == memory.shape[1]
        if not same:
            self.kv = self.split(self.k(memory)), self.split(self.v(memory))
        return self.attend(x, *self.kv, mask)


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention = Attention(dim, heads)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, mask):
        x = self.norm1(x + self.attention.self_attention(x, mask))
        return self.norm2(x + self.down(relu(self.up(x))))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention, self.cross = Attention(dim, heads), Attention(dim, heads)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, y, memory, source_mask, target_mask, incremental):
        y = self.norm1(y + self.attention.self_attention(y, target_mask, True, incremental))
        y = self.norm2(y + self.cross.cross_attention(y, memory, source_mask, incremental))
        return self.norm3(y + self.down(relu(self.up(y))))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dim = c.d_model
        self.source, self.target = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def encode(self, source, mask=None):
        x = self.source(source)
        x = x + sinusoid(0, source.shape[1], self.dim, x)
        for layer in self.encoder:
            x = layer(x, mask)
        return x

    def decode(self, target, memory, source_mask=None, target_mask=None, start=0, incremental=False):
        y = self.target(target)
        y = y + sinusoid(start, target.shape[1], self.dim, y)
        for layer in self.decoder:
            y = layer(y, memory, source_mask, target_mask, incremental)
        return self.head(y)

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is not None:
            source_mask = source_mask[:, None, None]
        if target_mask is not None:
            target_mask = target_mask[:, None, None]
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)

    def reset(self):
        for layer in self.decoder:
            layer.attention.kv = None
            layer.cross.kv = None

    @torch.no_grad()
    def chunks(self, source, chunks):
        self.reset()
        memory, outs, start = self.encode(source), [], 0
        for chunk in chunks:
            outs.append(self.decode(chunk, memory, start=start, incremental=True))
            start += chunk.shape[1]
        return torch.cat(outs, 1)

    @torch.no_grad()
    def generate(self, source, steps, use_cache):
        self.reset()
        memory = self.encode(source)
        tokens = torch.full((len(source), 1), START, dtype=torch.long, device=source.device)
        for n in range(steps):
            if use_cache:
                logits = self.decode(tokens[:, -1:], memory, start=n, incremental=True)
            else:
                logits = self.decode(tokens, memory)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.chunks(source, chunks),
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
    },
)
