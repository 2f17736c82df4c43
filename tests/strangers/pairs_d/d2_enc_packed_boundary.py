import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("padding is removed and the batch packed into one row; the sample of a token is found by searchsorted in the cumulative "
        "lengths without right=True, so the first token of each sample but the first counts as the last of the sample before")
PLACE = "Packed.forward: torch.searchsorted(ends, index), side"


def encode_at(pos, d, like):
    inv = 10000.0 ** (-torch.arange(0, d, 2).to(like) / d)
    ang = pos.to(like)[:, None] * inv
    return torch.stack((ang.sin(), ang.cos()), -1).reshape(len(pos), -1)[:, :d]


class PackedBlock(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h, self.d = h, d
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.na, self.nb, self.ff1, self.ff2 = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, same):                                              # x: [N, D], all samples in a row
        y = self.na(x)
        q, (k, v) = self.q(y), self.kv(y).chunk(2, -1)
        q, k, v = (z.view(len(x), self.h, self.d // self.h).transpose(0, 1) for z in (q, k, v))
        w = (q @ k.mT / math.sqrt(self.d // self.h)).masked_fill(~same, -math.inf).softmax(-1)
        x = x + self.o((w @ v).transpose(0, 1).reshape(len(x), self.d))
        return x + self.ff2(torch.relu(self.ff1(self.nb(x))))


class Packed(nn.Module):
    def __init__(self, c, side):
        super().__init__()
        self.right = side
        self.emb, self.norm = nn.Embedding(c.vocab_size, c.d_model), nn.LayerNorm(c.d_model)
        self.blocks = nn.ModuleList(PackedBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def forward(self, ids, mask=None):
        keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        ends = keep.sum(1).cumsum(0)
        sample = torch.searchsorted(ends, torch.arange(int(ends[-1])), right=self.right)
        x = self.emb(ids[keep])
        x = x + encode_at((keep.long().cumsum(1) - 1)[keep], x.size(-1), x)
        for block in self.blocks:
            x = block(x, sample[:, None] == sample[None])
        out = x.new_zeros(*ids.shape, x.size(-1))
        out[keep] = self.norm(x)
        return out


def _make(side):
    return Subject(kind="encoder", build=lambda c: Packed(c, side),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": False, "positions": "sinusoidal", "layout": "interleaved", "norm_placement": "pre",
                             "padding_side": "both", "activation": "relu"})


right, wrong = _make(True), _make(False)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    x = torch.randint(0, 11, (3, 6)); m = torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [0] * 2 + [1] * 4])

    def alone(row, keep):                                                    # naive: a sample for itself, nothing packed
        h = a.emb(row[keep]); n = len(h); h = h + encode_at(torch.arange(n), 16, h)
        for blk in a.blocks:
            h = blk(h, torch.ones(n, n, dtype=torch.bool))
        return a.norm(h)

    e = [[(net(x, m)[i][m[i].bool()] - alone(x[i], m[i].bool())).abs().max().item() for i in range(3)] for net in (a, b)]
    one = (b(x[:1]) - a(x[:1])).abs().max().item()
    print("right", e[0], "wrong", e[1], "wrong, one sample", one)
    assert max(e[0]) < 1e-4 and min(e[1]) > 1e-3 and one == 0
