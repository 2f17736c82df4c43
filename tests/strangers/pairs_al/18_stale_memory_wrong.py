WHAT = 'reset() clears the cache of self-attention but not the projected memory of cross-attention: a second source is decoded with the keys and values of the first (line 44)'
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject


class CachedAttention(nn.Module):
    def __init__(self, d, h, static):
        super().__init__()
        self.h, self.static = h, static
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.store = None

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, memory=None, mask=None, incremental=False):
        source = x if memory is None else memory
        if incremental and self.static and self.store is not None:
            k, v = self.store
        else:
            k, v = self.split(self.k(source)), self.split(self.v(source))
            if incremental and not self.static and self.store is not None:
                k, v = torch.cat((self.store[0], k), 2), torch.cat((self.store[1], v), 2)
            if incremental:
                self.store = (k, v)
        if mask == "causal":
            t, s = x.shape[1], k.shape[2]
            mask = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(self.split(self.q(x)), k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))


class DecLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn, self.cross_attn = CachedAttention(d, h, False), CachedAttention(d, h, True)
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)

    def reset(self):
        self.self_attn.store = None

    def forward(self, x, memory, incremental):
        x = x + self.self_attn(self.n1(x), mask="causal", incremental=incremental)
        x = x + self.cross_attn(self.n2(x), memory, incremental=incremental)
        return x + self.fc2(F.relu(self.fc1(self.n3(x))))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.emb, self.pos = nn.Embedding(c.vocab_size, d), nn.Embedding(c.max_len, d)
        self.enc = nn.ModuleList([nn.TransformerEncoderLayer(d, c.num_heads, c.d_ff, 0.0, batch_first=True, norm_first=True)
                                  for _ in range(c.num_layers)])
        self.dec = nn.ModuleList([DecLayer(d, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.enc_norm, self.dec_norm, self.out = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, c.vocab_size)

    def lookup(self, ids, start=0):
        return self.emb(ids) + self.pos.weight[start : start + ids.shape[1]]

    def encode(self, source):
        x = self.lookup(source)
        for layer in self.enc:
            x = layer(x)
        return self.enc_norm(x)

    def decode(self, ids, memory, start=0, incremental=False):
        x = self.lookup(ids, start)
        for layer in self.dec:
            x = layer(x, memory, incremental)
        return self.out(self.dec_norm(x))

    def forward(self, source, target):
        return self.decode(target, self.encode(source))


def cached(model, source, chunks):
    for layer in model.dec:
        layer.reset()
    memory, start, outs = model.encode(source), 0, []
    for chunk in chunks:
        outs.append(model.decode(chunk, memory, start, incremental=True))
        start += chunk.shape[1]
    return torch.cat(outs, 1)


subject = Subject(
    kind="encoder_decoder", name="seq2seq", build=Seq2Seq, forward=lambda m, source, target: m(source, target), cache=cached,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "relu"},
)
