"""Decoder with a mixture of experts in its feed-forward part."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "Experts choose their best tokens of the whole sequence (expert choice), so a later token can take an earlier one's place: a leak."
PLACE = "routing, the axis of top-k"
E = 4


def tokens_choose(p):  # [B, T, E]: each token takes its best expert
    best = p.argmax(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, best, p.gather(-1, best))


def experts_choose(p):  # each expert takes its T/2 best tokens
    top, idx = p.topk((p.shape[1] + 1) // 2, dim=1)
    return torch.zeros_like(p).scatter(1, idx, top)


class Decoder(nn.Module):
    def __init__(self, vocab, d, h, ff, choose):
        super().__init__()
        self.h, self.choose = h, choose
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(d) for _ in range(3))
        self.qkv, self.o, self.gate = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d)) for _ in range(E))

    def moe(self, x):
        w = self.choose(self.gate(x).softmax(-1))
        return sum(w[..., e, None] * f(x) for e, f in enumerate(self.experts))

    def forward(self, ids, mask=None):
        x = self.emb(ids)
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / q.shape[-1] ** 0.5
        ok = torch.ones_like(s, dtype=torch.bool).tril()
        if mask is not None:
            ok = ok & mask.bool()[:, None, None]
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        x = x + self.o((w @ v).transpose(1, 2).flatten(2))
        return self.head(self.n3(x + self.moe(self.n2(x))))


def subject(choose):
    return Subject(kind="decoder", build=lambda c: Decoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, choose),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask), mask_forms=("padding",),
                   declares={"causal": True, "positions": "none", "stacked": False, "structure": "other", "norm": "layer",
                             "norm_placement": "pre", "final_norm": True, "padding_side": "both", "tied": False})


right, wrong = subject(tokens_choose), subject(experts_choose)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Decoder(11, 16, 2, 32, tokens_choose), Decoder(11, 16, 2, 32, experts_choose)
    z.load_state_dict(a.state_dict())
    ids = torch.randint(0, 11, (4, 8))
    y = torch.randn(1, 3, 16)
    p = a.gate(y).softmax(-1)[0]
    naive = torch.stack([p[t].max() * a.experts[p[t].argmax()](y[0, t]) for t in range(3)])
    print("mixture against naive", (a.moe(y)[0] - naive).abs().max().item())
    assert torch.allclose(a.moe(y)[0], naive, atol=1e-5)
    other = ids.clone()
    other[:, 4:] = torch.randint(0, 11, (4, 4))
    dr, dw = ((m(ids)[:, :4] - m(other)[:, :4]).abs().max().item() for m in (a, z))
    print("first half when the second changes:", dr, dw)
    assert dr < 1e-6 and dw > 1e-2
