"""Sliding-window decoder with a rolling key-value cache; window 4."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The cache is cut to the window before attention, so the first queries of a chunk miss keys that its later keys have pushed out."
PLACE = "update of the rolling cache, what it returns"
W = 4


class Decoder(nn.Module):
    def __init__(self, vocab, d, h, layers):
        super().__init__()
        self.h, self.emb, self.head = h, nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers + 1))

    def update(self, past, new):  # past and new: keys, values, positions -> (to attend to, to keep)
        if past is None:
            return new, tuple(z[:, :, -W:] for z in new)
        both = tuple(torch.cat(p, 2) for p in zip(past, new))
        return both, tuple(z[:, :, -W:] for z in both)

    def step(self, tokens, mask, caches, start):
        x, t = self.emb(tokens), tokens.shape[1]
        at = torch.arange(start, start + t, device=x.device)
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out)):
            q, k, v = qkv(self.norms[i](x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
            (k, v, pos), caches[i] = self.update(caches[i], (k, v, at[None, None]))
            gap = at[:, None] - pos[0, 0]
            ok = ((gap >= 0) & (gap < W)) & mask[:, pos[0, 0]][:, None, None]
            s = q @ k.mT * q.shape[-1] ** -0.5
            w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
            x = x + out((w @ v).transpose(1, 2).flatten(2))
        return self.head(self.norms[-1](x))

    def cached(self, chunks, mask=None, reorder=None):
        total = sum(c.shape[1] for c in chunks)
        mask = torch.ones(chunks[0].shape[0], total, dtype=torch.bool) if mask is None else mask.bool()
        caches, outs, start = [None] * len(self.qkv), [], 0
        for n, c in enumerate(chunks):
            if n == 1 and reorder is not None:
                mask, caches = mask[reorder], [(k[reorder], v[reorder], p) for k, v, p in caches]
            outs.append(self.step(c, mask, caches, start))
            start += c.shape[1]
        return torch.cat(outs, 1)

    def forward(self, tokens, mask=None):
        return self.cached([tokens], mask)


class CutFirst(Decoder):
    def update(self, past, new):
        if past is None:
            return new, tuple(z[:, :, -W:] for z in new)
        both = tuple(torch.cat(p, 2)[:, :, -W:] for p in zip(past, new))
        return both, both


def subject(cls):
    return Subject(kind="decoder", build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask), mask_forms=("padding",),
                   cache=lambda m, chunks, attention_mask=None, reorder=None: m.cached(chunks, attention_mask, reorder),
                   declares={"causal": True, "window": W, "positions": "none", "norm_placement": "pre", "final_norm": True})


right, wrong = subject(Decoder), subject(CutFirst)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Decoder(11, 16, 2, 1), CutFirst(11, 16, 2, 1)
    z.load_state_dict(a.state_dict())
    ids = torch.randint(0, 11, (2, 10))
    u, g = a.emb(ids), torch.arange(10)[:, None] - torch.arange(10)
    q, k, v = (p.view(2, 10, 2, 8).transpose(1, 2) for p in a.qkv[0](a.norms[0](u)).chunk(3, -1))
    s = (q @ k.mT / 8 ** 0.5).masked_fill((g < 0) | (g >= W), float("-inf")).softmax(-1)
    want = a.head(a.norms[1](u + a.out[0]((s @ v).transpose(1, 2).reshape(2, 10, 16))))
    for sizes, clash in (((10,), 0), ((6, 1, 1, 1, 1), 0), ((5, 3, 2), 1)):
        dr, dw = ((m.cached(ids.split(sizes, 1)) - want).abs().max().item() for m in (a, z))
        print(sizes, dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == clash
