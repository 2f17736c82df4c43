"""Prefix-LM: the first three positions see one another, the rest is causal."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The prefix block is joined by 'or' after the padding mask was applied, so padding inside the prefix becomes visible."
PLACE = "combination of causal, padding and prefix masks"
P = 3


class PrefixLM(nn.Module):
    def __init__(self, vocab, d, h, layers):
        super().__init__()
        self.h, self.emb, self.head = h, nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.norm = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))

    def join(self, causal, prefix, pad):
        return (causal | prefix) & pad

    def forward(self, ids, mask=None):
        n = torch.arange(ids.shape[1], device=ids.device)
        pad = torch.ones_like(ids) if mask is None else mask
        ok = self.join(n <= n[:, None], (n < P) & (n[:, None] < P), pad.bool()[:, None, None])
        x = self.emb(ids)
        for f, o, norm in zip(self.qkv, self.out, self.norm):
            q, k, v = (z.unflatten(-1, (self.h, -1)).transpose(1, 2) for z in f(norm(x)).chunk(3, -1))
            s = q @ k.mT / q.shape[-1] ** 0.5
            w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
            x = x + o((w @ v).transpose(1, 2).flatten(2))
        return self.head(self.norm[-1](x))


class PrefixLast(PrefixLM):
    def join(self, causal, prefix, pad):
        return (causal & pad) | prefix


def subject(cls):
    return Subject(kind="decoder", build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask), mask_forms=("padding",),
                   declares={"causal": True, "prefix": P, "positions": "none", "padding_side": "right", "norm": "layer",
                             "norm_placement": "pre", "final_norm": True, "tied": False})


right, wrong = subject(PrefixLM), subject(PrefixLast)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = PrefixLM(11, 16, 2, 1), PrefixLast(11, 16, 2, 1)
    z.load_state_dict(a.state_dict())
    ids = torch.randint(0, 11, (1, 6))

    def naive(ids):
        t, x = ids.shape[1], a.emb(ids)
        q, k, v = (p.view(1, t, 2, 8).transpose(1, 2) for p in a.qkv[0](a.norm[0](x)).chunk(3, -1))
        y = torch.zeros(1, 2, t, 8)
        for i in range(t):
            n = max(i + 1, min(P, t) if i < P else 0)
            y[:, :, i] = ((q[:, :, i:i + 1] @ k[:, :, :n].mT / 8 ** 0.5).softmax(-1) @ v[:, :, :n])[:, :, 0]
        return a.head(a.norm[1](x + a.out[0](y.transpose(1, 2).reshape(1, t, 16))))

    for real in (6, 4, 2):
        mask, want = torch.arange(6)[None] < real, naive(ids[:, :real])
        dr, dw = ((m(ids, mask)[:, :real] - want).abs().max().item() for m in (a, z))
        print(real, "real", dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == (real < P)
