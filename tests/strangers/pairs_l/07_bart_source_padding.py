"""BART-like sequence to sequence model, learned positions, post-norm, written with einsum."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, kv, keep=None):
        q, k, v = (w(t).unflatten(-1, (self.h, -1)) for w, t in ((self.wq, x), (self.wk, kv), (self.wv, kv)))
        s = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        if keep is not None:
            s = s.masked_fill(~keep, torch.finfo(s.dtype).min)
        return self.wo(torch.einsum("bhts,bshd->bthd", s.softmax(-1), v).flatten(-2))


class FFN(nn.Sequential):
    def __init__(self, d, f):
        super().__init__(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))


def bart(memory_keep):
    class EncLayer(nn.Module):
        def __init__(self, d, h, f):
            super().__init__()
            self.att, self.ffn = Attn(d, h), FFN(d, f)
            self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

        def forward(self, x, keep):
            x = self.n1(x + self.att(x, x, keep))
            return self.n2(x + self.ffn(x))

    class DecLayer(nn.Module):
        def __init__(self, d, h, f):
            super().__init__()
            self.att, self.cross, self.ffn = Attn(d, h), Attn(d, h), FFN(d, f)
            self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)

        def forward(self, y, mem, keep, mem_keep):
            y = self.n1(y + self.att(y, y, keep))
            y = self.n2(y + self.cross(y, mem, mem_keep))
            return self.n3(y + self.ffn(y))

    class Bart(nn.Module):
        def __init__(self, vocab, d, h, n, f, max_len):
            super().__init__()
            self.tok = nn.Embedding(vocab, d)
            self.pos_e, self.pos_d = nn.Embedding(max_len, d), nn.Embedding(max_len, d)
            self.ln_e, self.ln_d = nn.LayerNorm(d), nn.LayerNorm(d)
            self.enc = nn.ModuleList(EncLayer(d, h, f) for _ in range(n))
            self.dec = nn.ModuleList(DecLayer(d, h, f) for _ in range(n))

        def forward(self, src, tgt, src_keep=None, tgt_keep=None):
            at = lambda t: torch.arange(t.shape[1], device=t.device)
            keep = None if src_keep is None else src_keep[:, None, None, :]
            x = self.ln_e(self.tok(src) + self.pos_e(at(src)))
            for layer in self.enc:
                x = layer(x, keep)
            y = self.ln_d(self.tok(tgt) + self.pos_d(at(tgt)))
            see = at(tgt)[:, None] >= at(tgt)
            if tgt_keep is not None:
                see = see & tgt_keep[:, None, None, :]
            for layer in self.dec:
                y = layer(y, x, see, memory_keep(keep))
            return F.linear(y, self.tok.weight)

    return Bart


def subject(cls):
    return Subject(
        kind="encoder_decoder",
        name="bart",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
        declares={"padding_side": "right"},
    )


right = subject(bart(lambda keep: keep))
wrong = subject(bart(lambda keep: None))
WHAT = "the encoder hides the padding of the source, the decoder's cross-attention gets no mask and reads it"
CAUSE = (
    "Cross-attention ignores source_mask: padded source positions are hidden in the encoder alone, and reach the decoder "
    "through the memory."
)
