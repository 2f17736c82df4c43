"""Decoder with a short causal convolution before attention, as in Canon or H3 layers."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "Padded tokens are not zeroed before the causal convolution, so with left padding they run into the first real tokens."
PLACE = "input of the short convolution"
K = 3


class Decoder(nn.Module):
    def __init__(self, vocab, d, h):
        super().__init__()
        self.h, self.emb, self.head = h, nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.conv, self.qkv, self.o = nn.Conv1d(d, d, K, groups=d, bias=False), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def clean(self, x, mask):
        return x if mask is None else x.masked_fill(~mask.bool()[..., None], 0.0)

    def shift(self, x, mask):
        return self.conv(F.pad(self.clean(x, mask).transpose(1, 2), (K - 1, 0))).transpose(1, 2)

    def forward(self, ids, mask=None):
        x = self.emb(ids)
        x = x + self.shift(x, mask)
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        s = q @ k.mT * q.shape[-1] ** -0.5
        ok = torch.ones_like(s, dtype=torch.bool).tril()
        if mask is not None:
            ok = ok & mask.bool()[:, None, None]
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        return self.head(self.n2(x + self.o((w @ v).transpose(1, 2).flatten(2))))


class Unclean(Decoder):
    def clean(self, x, mask):
        return x


def subject(cls):
    return Subject(kind="decoder", build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads), mask_forms=("padding",),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": True, "positions": "other", "padding_side": "both", "stacked": False,
                             "structure": "other", "norm": "layer", "norm_placement": "pre", "final_norm": True,
                             "tied": False, "output_bias": False})


right, wrong = subject(Decoder), subject(Unclean)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Decoder(11, 16, 2), Unclean(11, 16, 2)
    z.load_state_dict(a.state_dict())
    ids = torch.randint(0, 11, (1, 5))
    e, c = a.emb(ids), a.conv.weight[:, 0]
    x = torch.stack([e[:, t] + sum(c[:, K - 1 - j] * e[:, t - j] for j in range(K) if t >= j) for t in range(5)], 1)
    q, k, v = (p.view(1, 5, 2, 8).transpose(1, 2) for p in a.qkv(a.n1(x)).chunk(3, -1))
    s = (q @ k.mT / 8 ** 0.5 + torch.full((5, 5), float("-inf")).triu(1)).softmax(-1)
    want = a.head(a.n2(x + a.o((s @ v).transpose(1, 2).reshape(1, 5, 16))))
    pads = torch.randint(0, 11, (1, 2))
    for side in ("right", "left"):
        row = torch.cat([ids, pads] if side == "right" else [pads, ids], 1)
        real = slice(0, 5) if side == "right" else slice(2, 7)
        mask = torch.zeros(1, 7).long()
        mask[:, real] = 1
        dr, dw = ((m(row, mask)[:, real] - want).abs().max().item() for m in (a, z))
        print(side, dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == (side == "left")
