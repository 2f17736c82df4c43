import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the target's padding mask is combined with the causal mask along the query axis ([:, :, None]) instead of the key axis, "
        "so padded targets are seen as keys (what is silenced are the padded queries' own rows)")
PLACE = "Seq2Seq.forward: unsqueeze of target_mask in the decoder's self-attention mask"


class Attend(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, m, ok):                                   # ok: [B, 1 or T, S]
        heads = lambda z: z.view(z.size(0), z.size(1), self.h, -1).transpose(1, 2)
        q, k, v = heads(self.q(x)), heads(self.k(m)), heads(self.v(m))
        s = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.size(-1))
        w = s.masked_fill(~ok[:, None], torch.finfo(s.dtype).min).softmax(-1)
        return self.o(torch.einsum("bhts,bhsk->bthk", w, v).flatten(2))


class Part(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        d = c.d_model
        self.own, self.other = Attend(d, c.num_heads), Attend(d, c.num_heads) if cross else None
        self.ff = nn.Sequential(nn.Linear(d, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, d))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3 if cross else 2))

    def forward(self, x, ok, memory=None, memory_ok=None):
        x = self.norms[0](x + self.own(x, x, ok))
        if memory is not None:
            x = self.norms[2](x + self.other(x, memory, memory_ok))
        return self.norms[1](x + self.ff(x))


class Seq2Seq(nn.Module):
    def __init__(self, c, rows):
        super().__init__()
        self.rows = rows
        self.es, self.et = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.ps, self.pt = nn.Embedding(c.max_len, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.enc = nn.ModuleList(Part(c, False) for _ in range(c.num_layers))
        self.dec = nn.ModuleList(Part(c, True) for _ in range(c.num_layers))
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, source, target, source_mask=None, target_mask=None):
        sm = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask.bool()
        tm = torch.ones_like(target, dtype=torch.bool) if target_mask is None else target_mask.bool()
        at = lambda m: (m.long().cumsum(1) - 1).clamp(min=0)        # positions count real tokens
        x = self.es(source) + self.ps(at(sm))
        for e in self.enc:
            x = e(x, sm[:, None])
        t = target.size(1)
        ok = torch.ones(t, t, dtype=torch.bool).tril() & (tm[:, :, None] if self.rows else tm[:, None, :])
        y = self.et(target) + self.pt(at(tm))
        for d in self.dec:
            y = d(y, ok, x, sm[:, None])
        return self.head(y)


def _make(rows):
    return Subject(kind="encoder_decoder", build=lambda c: Seq2Seq(c, rows),
                   forward=lambda m, s, t, source_mask=None, target_mask=None: m(s, t, source_mask, target_mask),
                   declares={"causal": True, "positions": "learned", "norm_placement": "post", "padding_side": "both",
                             "activation": "relu", "tied": False})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    s, t = torch.randint(0, 11, (1, 5)), torch.randint(0, 11, (1, 6)); left = torch.tensor([[0, 0, 1, 1, 1, 1]])
    for name, m, cut in (("left", left, slice(2, 6)), ("right", left.flip(1), slice(0, 4))):
        e = [(n(s, t, None, m)[:, cut] - a(s, t[:, cut])).abs().max().item() for n in (a, b)]    # naive: without padding
        print(name, "right", e[0], "wrong", e[1])
        assert e[0] < 1e-4 and (e[1] > 1e-2) == (name == "left")
