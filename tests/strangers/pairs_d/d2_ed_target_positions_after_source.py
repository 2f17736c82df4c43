import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the position counter is not set back after encoding, so target positions go on at the padded length of the source: "
        "the same pair is translated differently when the batch pads its source further")
PLACE = "Shared.embed: offset of the decoder's positions"


def sinusoid(start, t, d, like):
    k = torch.arange(d)
    ang = torch.arange(start, start + t)[:, None].to(like) / 10000.0 ** ((k - k % 2).to(like) / d)
    return torch.where(k % 2 == 0, ang.sin(), ang.cos())


class MHA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.dk = h, d // h
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(d, d) for _ in range(4))

    def forward(self, a, b, bias):
        f = lambda lin, z: lin(z).view(*z.shape[:2], self.h, self.dk).transpose(1, 2)
        s = f(self.Wq, a) @ f(self.Wk, b).mT / math.sqrt(self.dk) + bias
        return self.Wo((s.softmax(-1) @ f(self.Wv, b)).transpose(1, 2).flatten(2))


class Shared(nn.Module):
    def __init__(self, c, carry_on):
        super().__init__()
        d, n = c.d_model, c.num_layers
        self.carry_on, self.scale = carry_on, math.sqrt(d)
        self.table = nn.Embedding(c.vocab_size, d)
        mk = lambda k, f: nn.ModuleList(f() for _ in range(k))
        self.enc_a, self.dec_a, self.dec_x = (mk(n, lambda: MHA(d, c.num_heads)) for _ in range(3))
        self.enc_f, self.dec_f = (mk(n, lambda: nn.Sequential(nn.Linear(d, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, d))) for _ in range(2))
        self.enc_n, self.dec_n = mk(2 * n, lambda: nn.LayerNorm(d)), mk(3 * n, lambda: nn.LayerNorm(d))

    def embed(self, ids, start):
        x = self.table(ids) * self.scale
        return x + sinusoid(start, ids.size(1), x.size(-1), x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        x, low = self.embed(source, 0), torch.finfo(self.table.weight.dtype).min
        y = self.embed(target, source.size(1) if self.carry_on else 0)
        hide = lambda m, z: x.new_zeros(()) if m is None else x.new_zeros(m.shape).masked_fill(~m.bool(), low)[:, None, None]
        t = target.size(1)
        causal = x.new_full((t, t), low).triu(1)
        own = torch.maximum(causal + hide(target_mask, y), x.new_tensor(low))
        for i, (a, f) in enumerate(zip(self.enc_a, self.enc_f)):
            x = self.enc_n[2 * i](x + a(x, x, hide(source_mask, x)))
            x = self.enc_n[2 * i + 1](x + f(x))
        for i, (a, c, f) in enumerate(zip(self.dec_a, self.dec_x, self.dec_f)):
            y = self.dec_n[3 * i](y + a(y, y, own))
            y = self.dec_n[3 * i + 1](y + c(y, x, hide(source_mask, x)))
            y = self.dec_n[3 * i + 2](y + f(y))
        return y @ self.table.weight.T


def _make(flag):
    return Subject(kind="encoder_decoder", build=lambda c: Shared(c, flag),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "positions": "sinusoidal", "layout": "interleaved", "embedding_scale": True, "tied": True,
                             "norm_placement": "post", "activation": "relu", "padding_side": "right", "output_bias": False})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    s, t = torch.randint(0, 11, (1, 5)), torch.randint(0, 11, (1, 4))
    pe = torch.tensor([[(math.sin if k % 2 == 0 else math.cos)(p / 10000 ** ((k - k % 2) / 16)) for k in range(16)] for p in range(4)])
    naive = a.table(t[0]) * 4 + pe                                             # the formula of the paper, positions 0..3
    assert torch.allclose(a.embed(t, 0)[0], naive, atol=1e-5)
    for fill in (0, 1, 3):
        m = torch.tensor([[1] * 5 + [0] * fill]); p = nn.functional.pad(s, (0, fill))
        e = [(n(p, t, m) - n(s, t)).abs().max().item() for n in (a, b)]
        print("source padded by", fill, "right", e[0], "wrong", e[1], "wrong - right", (b(s, t) - a(s, t)).abs().max().item())
        assert e[0] < 1e-4 and (e[1] > 1e-2) == (fill > 0)
