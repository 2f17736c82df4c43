WHAT = 'reset() of a decoder layer (line 57) forgets the keys and values of the cross-attention: a second call of generate with a source of the same shape goes on with the memory of the first.'
# Small translation model; layers keep their own keys and values while generating.
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

BOS = 0


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def keys_values(self, x):
        return self.split(self.k(x)), self.split(self.v(x))

    def forward(self, x, kv, allowed=None):
        q = self.split(self.q(x))
        scores = q @ kv[0].transpose(-1, -2) / q.size(-1) ** 0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ kv[1]).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attn, self.ff = Attention(dim, heads), FeedForward(dim, hidden)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, allowed):
        h = self.n1(x)
        x = x + self.attn(h, self.attn.keys_values(h), allowed)
        return x + self.ff(self.n2(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attn, self.cross, self.ff = Attention(dim, heads), Attention(dim, heads), FeedForward(dim, hidden)
        self.n1, self.n2, self.n3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_kv, self.cross_kv = None, None

    def reset(self):
        self.self_kv = None

    def forward(self, x, memory, allowed, memory_allowed):
        h = self.n1(x)
        x = x + self.attn(h, self.attn.keys_values(h), allowed)
        x = x + self.cross(self.n2(x), self.cross.keys_values(memory), memory_allowed)
        return x + self.ff(self.n3(x))

    def step(self, x, memory):
        h = self.n1(x)
        kv = self.attn.keys_values(h)
        if self.self_kv is not None:
            kv = tuple(torch.cat(pair, dim=2) for pair in zip(self.self_kv, kv))
        self.self_kv = kv
        x = x + self.attn(h, kv)
        kv = self.cross_kv
        if kv is None or kv[0].size(0) != memory.size(0) or kv[0].size(2) != memory.size(1):
            kv = self.cross_kv = self.cross.keys_values(memory)
        x = x + self.cross(self.n2(x), kv)
        return x + self.ff(self.n3(x))


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.source_embed, self.target_embed = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.source_pos, self.target_pos = nn.Embedding(max_len, dim), nn.Embedding(max_len, dim)
        self.encoder = nn.ModuleList([EncoderLayer(dim, heads, hidden) for _ in range(layers)])
        self.decoder = nn.ModuleList([DecoderLayer(dim, heads, hidden) for _ in range(layers)])
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def encode(self, source, mask=None):
        x = self.source_embed(source) + self.source_pos.weight[: source.size(1)]
        allowed = None if mask is None else mask[:, None, None, :]
        for layer in self.encoder:
            x = layer(x, allowed)
        return self.encoder_norm(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encode(source, source_mask)
        T = target.size(1)
        x = self.target_embed(target) + self.target_pos.weight[:T]
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        memory_allowed = None if source_mask is None else source_mask[:, None, None, :]
        for layer in self.decoder:
            x = layer(x, memory, allowed, memory_allowed)
        return self.head(self.decoder_norm(x))

    @torch.no_grad()
    def generate(self, source, steps, use_cache=True):
        out = source.new_full((source.size(0), 1), BOS)
        if use_cache:
            memory = self.encode(source)
            for layer in self.decoder:
                layer.reset()
        for i in range(steps):
            if use_cache:
                x = self.target_embed(out[:, -1:]) + self.target_pos.weight[i]
                for layer in self.decoder:
                    x = layer.step(x, memory)
                logits = self.head(self.decoder_norm(x))
            else:
                logits = self(source, out)
            out = torch.cat([out, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return out


subject = Subject(
    kind="encoder_decoder",
    name="small seq2seq",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    generate=lambda m, source, steps, use_cache: m.generate(source, steps, use_cache),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "padding_side": "right",
    },
)
