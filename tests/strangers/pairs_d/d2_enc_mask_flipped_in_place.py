from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the padding mask is inverted in place: a boolean mask is the caller's own tensor (.bool() does not copy it), so after "
        "one call the caller holds the opposite and the next call with it attends to the padding alone")
PLACE = "Bertish.forward: `mask.bool().logical_not_()`"


class Bertish(nn.Module):
    def __init__(self, c, in_place):
        super().__init__()
        self.in_place = in_place
        self.word, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.first = nn.LayerNorm(c.d_model)
        self.att = nn.ModuleList(nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True) for _ in range(c.num_layers))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
                                for _ in range(c.num_layers))
        self.n1 = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.n2 = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))

    def forward(self, ids, mask=None):
        pad = None
        if mask is not None:
            mask = mask.bool()
            pad = mask.logical_not_() if self.in_place else mask.logical_not()
        x = self.first(self.word(ids) + self.place.weight[None, : ids.size(1)])
        for a, n1, f, n2 in zip(self.att, self.n1, self.ff, self.n2):
            x = n1(x + a(x, x, x, key_padding_mask=pad, need_weights=False)[0])
            x = n2(x + f(x))
        return x


def _make(in_place):
    return Subject(kind="encoder", build=lambda c: Bertish(c, in_place),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post",
                             "activation": "gelu", "padding_side": "right"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    x = torch.randint(0, 11, (2, 6)); want = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    for m, dtype in ((a, torch.bool), (a, torch.long), (b, torch.long), (b, torch.bool)):
        mask, errs, changed = want.to(dtype).clone(), [], []
        for _ in range(2):
            y = m(x, mask)
            errs.append((y[1:, :4] - a(x[1:, :4])).abs().max().item())        # naive: the sample without its padding
            changed.append(not torch.equal(mask.bool(), want))
        print("right" if m is a else "wrong", dtype, errs, "mask changed:", changed)
        bad = m is b and dtype == torch.bool
        assert changed[0] == bad and errs[0] < 1e-4 and (not errs[1] < 1e-2) == bad
