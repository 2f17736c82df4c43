from types import SimpleNamespace
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = ("one attention module serves both uses and takes queries and keys of equal number for self-attention: when source and "
        "target happen to have the same length, cross-attention becomes causal and hides the rest of the source")
PLACE = "Attention.forward: `causal = self.decoder and q.size(2) == k.size(2)`"


class Attention(nn.Module):
    def __init__(self, d, h, decoder, guess):
        super().__init__()
        self.h, self.decoder, self.guess = h, decoder, guess
        self.to_q, self.to_kv, self.to_o = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, memory=None, keep=None):
        b, t, d = x.shape
        k, v = self.to_kv(x if memory is None else memory).chunk(2, -1)
        q, k, v = (z.unflatten(-1, (self.h, -1)).transpose(1, 2) for z in (self.to_q(x), k, v))
        if self.guess:
            causal = self.decoder and q.size(2) == k.size(2)
        else:
            causal = self.decoder and memory is None
        ok = torch.ones(t, k.size(2), dtype=torch.bool)
        ok = ok.tril() if causal else ok
        if keep is not None:
            ok = ok & keep.bool()[:, None, None, :]
        bias = torch.zeros(ok.shape, dtype=q.dtype).masked_fill(~ok, torch.finfo(q.dtype).min)
        return self.to_o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class Stage(nn.Module):
    def __init__(self, c, decoder, guess):
        super().__init__()
        d = c.d_model
        self.a = Attention(d, c.num_heads, decoder, guess)
        self.x = Attention(d, c.num_heads, decoder, guess) if decoder else None
        self.f = nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d))
        self.na, self.nx, self.nf = nn.RMSNorm(d), nn.RMSNorm(d) if decoder else None, nn.RMSNorm(d)

    def forward(self, h, keep, memory=None, memory_keep=None):
        h = h + self.a(self.na(h), keep=keep)
        if self.x is not None:
            h = h + self.x(self.nx(h), memory, memory_keep)
        return h + self.f(self.nf(h))


class Translate(nn.Module):
    def __init__(self, c, guess):
        super().__init__()
        self.emb, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.enc = nn.ModuleList(Stage(c, False, guess) for _ in range(c.num_layers))
        self.dec = nn.ModuleList(Stage(c, True, guess) for _ in range(c.num_layers))
        self.ne, self.nd, self.head = nn.RMSNorm(c.d_model), nn.RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, source, target, source_mask=None, target_mask=None):
        m = self.emb(source) + self.pos.weight[: source.size(1)]
        for s in self.enc:
            m = s(m, source_mask)
        m, y = self.ne(m), self.emb(target) + self.pos.weight[: target.size(1)]
        for s in self.dec:
            y = s(y, target_mask, m, source_mask)
        return self.head(self.nd(y))


def _make(guess):
    return Subject(kind="encoder_decoder", build=lambda c: Translate(c, guess),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "positions": "learned", "norm": "rms", "norm_placement": "pre", "final_norm": True,
                             "padding_side": "right", "activation": "gelu"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    A, h, mem = a.dec[0].x, torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    q, k, v = A.to_q(h)[0], *A.to_kv(mem)[0].chunk(2, -1)                       # naive: head by head, all keys
    want = A.to_o(torch.cat([((q[:, i:i + 8] @ k[:, i:i + 8].T) / 8 ** .5).softmax(-1) @ v[:, i:i + 8] for i in (0, 8)], 1))
    assert torch.allclose(A(h, mem)[0], want, atol=1e-5) and not torch.allclose(b.dec[0].x(h, mem)[0], want, atol=1e-2)
    for S in (4, 5, 6):
        s, t = torch.randint(0, 11, (1, S)), torch.randint(0, 11, (1, 5)); u = s.clone(); u[0, -1] = (u[0, -1] + 1) % 11
        e, same = (a(s, t) - b(s, t)).abs().max().item(), a(u, t)[:, 0].ne(a(s, t)[:, 0]).any().item()
        print("source", S, "target 5: wrong - right", e)
        assert (e > 1e-3) == (S == 5) and same
