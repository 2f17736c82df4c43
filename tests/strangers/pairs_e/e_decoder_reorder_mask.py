"""Decoder with a cache object for beam search."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "Beam search reorders the cached keys and values, not the cached padding mask, so a beam is read with another sample's mask."
PLACE = "reorder method of the cache"


class Cache:
    def __init__(self, layers):
        self.k, self.v, self.mask = [None] * layers, [None] * layers, None

    def see(self, mask):
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], 1)

    def add(self, i, k, v):
        self.k[i] = k if self.k[i] is None else torch.cat([self.k[i], k], 2)
        self.v[i] = v if self.v[i] is None else torch.cat([self.v[i], v], 2)
        return self.k[i], self.v[i]

    def reorder(self, order):
        self.k, self.v = [z.index_select(0, order) for z in self.k], [z.index_select(0, order) for z in self.v]
        self.mask = self.mask.index_select(0, order)


class KeepsMask(Cache):
    def reorder(self, order):
        self.k, self.v = [z.index_select(0, order) for z in self.k], [z.index_select(0, order) for z in self.v]


class Decoder(nn.Module):
    def __init__(self, vocab, d, h, layers, cache):
        super().__init__()
        self.h, self.cache, self.emb = h, cache, nn.Embedding(vocab, d)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(layers))
        self.norm = nn.ModuleList(nn.RMSNorm(d, eps=1e-6) for _ in range(layers + 1))

    def step(self, ids, mask, cache):
        cache.see(mask)
        x, stop = self.emb(ids), cache.mask.shape[1]
        ok = torch.ones(ids.shape[1], stop, dtype=torch.bool).tril(stop - ids.shape[1]) & cache.mask[:, None, None]
        for i, (f, o, n) in enumerate(zip(self.qkv, self.out, self.norm)):
            q, k, v = f(n(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
            k, v = cache.add(i, k, v)
            s = q @ k.mT / q.shape[-1] ** 0.5
            w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
            x = x + o((w @ v).transpose(1, 2).flatten(2))
        return self.norm[-1](x) @ self.emb.weight.T

    def cached(self, chunks, mask=None, reorder=None):
        cache, outs, sizes = self.cache(len(self.qkv)), [], [c.shape[1] for c in chunks]
        mask = torch.ones(len(chunks[0]), sum(sizes)) if mask is None else mask
        for n, (ids, part) in enumerate(zip(chunks, mask.bool().split(sizes, 1))):
            if n == 1 and reorder is not None:
                cache.reorder(torch.as_tensor(reorder))
            outs.append(self.step(ids, part if n == 0 or reorder is None else part[torch.as_tensor(reorder)], cache))
        return torch.cat(outs, 1)


def subject(cache):
    return Subject(kind="decoder", build=lambda c: Decoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, cache),
                   forward=lambda m, tokens, attention_mask=None: m.cached([tokens], attention_mask), mask_forms=("padding",),
                   cache=lambda m, chunks, attention_mask=None, reorder=None: m.cached(chunks, attention_mask, reorder),
                   declares={"causal": True, "positions": "none", "norm": "rms", "tied": True, "padding_side": "both"})


right, wrong = subject(Cache), subject(KeepsMask)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Decoder(11, 16, 2, 2, Cache), Decoder(11, 16, 2, 2, KeepsMask)
    z.load_state_dict(a.state_dict())
    ids, more, order = torch.randint(0, 11, (2, 4)), torch.randint(0, 11, (2, 2)), torch.tensor([1, 0])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]).bool()
    want = [a.cached([torch.cat([ids[s:s + 1, mask[s, :4]], more[b:b + 1]], 1)])[0, -2:] for b, s in enumerate((1, 0))]
    dr, dw = ((m.cached([ids, more], mask, order)[:, 4:] - torch.stack(want)).abs().max().item() for m in (a, z))
    dn = (z.cached([ids, more], mask) - a.cached([torch.cat([ids, more], 1)], mask)).abs().max().item()
    print(dr, dw, "without reordering:", dn)
    assert dr < 1e-5 and dw > 1e-2 and dn < 1e-5
