"""The Transformer of the paper (post-LN, sinusoids, embeddings times sqrt(d_model)); cross attention streams long sources.

Sources of more than 64 tokens (documents) go through cross attention in slabs of 64 keys, each slab's log-sum-exp is kept and
the slabs are put together in the end.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WHAT = (
    "Cross attention over sources longer than 64 takes keys and values slab by slab, but reads the source mask of the first "
    "slab for each of them: padding behind position 64 is attended to (and a mask hole in the first slab is repeated)."
)
PLACE = "first_slab"

SLAB = 64


def this_slab(mask, start, width):
    return mask[:, start : start + width]


def first_slab(mask, start, width):
    return mask[:, :width]


class Attention(nn.Module):
    def __init__(self, d_model, h, mask_of_slab):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)
        self.mask_of_slab = mask_of_slab

    def heads(self, x):
        return x.view(x.size(0), x.size(1), self.h, self.d_k).transpose(1, 2)

    def one_slab(self, q, k, v, see):
        """see: [B, 1, T or 1, width]. Returns the softmax over this slab times v, and its log-sum-exp."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        scores = scores.masked_fill(~see, torch.finfo(scores.dtype).min)
        p = scores.softmax(-1).masked_fill(~see, 0.0)
        lse = scores.logsumexp(-1).masked_fill(~see.any(-1), torch.finfo(scores.dtype).min)
        return p @ v, lse

    def forward(self, x, y, pair=None, pad=None):
        q, k, v = self.heads(self.W_q(x)), self.heads(self.W_k(y)), self.heads(self.W_v(y))
        if pad is None:
            pad = torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)
        if pair is not None or k.size(2) <= SLAB:
            see = pad[:, None, None] if pair is None else pad[:, None, None] & pair
            out, _ = self.one_slab(q, k, v, see)
        else:
            parts = []
            for start in range(0, k.size(2), SLAB):
                width = min(SLAB, k.size(2) - start)
                see = self.mask_of_slab(pad, start, width)[:, None, None]
                parts.append(self.one_slab(q, k[:, :, start : start + width], v[:, :, start : start + width], see))
            share = torch.stack([lse for _, lse in parts], -1).softmax(-1).to(v.dtype)
            out = torch.stack([o for o, _ in parts], -1) @ share.unsqueeze(-1)
            out = out.squeeze(-1)
        return self.W_o(out.transpose(1, 2).reshape(x.size(0), x.size(1), -1))


class FeedForward(nn.Sequential):
    def __init__(self, d_model, d_ff):
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff, rule):
        super().__init__()
        self.attn, self.ff = Attention(d_model, h, this_slab), FeedForward(d_model, d_ff)
        self.norm = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2))

    def forward(self, y, pad):
        # the encoder never streams
        y = self.norm[0](y + self.attn(y, y, torch.ones(1, 1, dtype=torch.bool, device=y.device), pad))
        return self.norm[1](y + self.ff(y))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff, rule):
        super().__init__()
        self.attn, self.cross, self.ff = Attention(d_model, h, this_slab), Attention(d_model, h, rule), FeedForward(d_model, d_ff)
        self.norm = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x, y, causal, target_pad, source_pad):
        x = self.norm[0](x + self.attn(x, x, causal, target_pad))
        x = self.norm[1](x + self.cross(x, y, None, source_pad))
        return self.norm[2](x + self.ff(x))


class Transformer(nn.Module):
    def __init__(self, vocab, d_model, h, N, d_ff, rule):
        super().__init__()
        self.d_model = d_model
        self.lut = nn.Embedding(vocab, d_model)
        nn.init.normal_(self.lut.weight, std=d_model**-0.5)
        self.encoder = nn.ModuleList(EncoderLayer(d_model, h, d_ff, rule) for _ in range(N))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, h, d_ff, rule) for _ in range(N))
        self.generator = nn.Linear(d_model, vocab)

    def embed(self, ids):
        i = torch.arange(self.d_model, device=ids.device)
        angle = torch.arange(ids.size(1), device=ids.device).double()[:, None] / 10000.0 ** ((i - i % 2).double() / self.d_model)
        pe = torch.where(i % 2 == 0, angle.sin(), angle.cos())
        return self.lut(ids) * math.sqrt(self.d_model) + pe.to(self.lut.weight.dtype)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_pad = None if source_mask is None else source_mask.bool()
        target_pad = None if target_mask is None else target_mask.bool()
        y = self.embed(source)
        for layer in self.encoder:
            y = layer(y, source_pad)
        causal = torch.ones(target.size(1), target.size(1), dtype=torch.bool, device=target.device).tril()
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, y, causal, target_pad, source_pad)
        return self.generator(x)


def subject(rule, name):
    return Subject(
        kind="encoder_decoder",
        build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, rule),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": True,
            "positions": "sinusoidal",
            "layout": "interleaved",
            "base": 10000,
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "post",
            "final_norm": False,
            "residual": True,
            "activation": "relu",
            "output_bias": True,
            "tied": False,
            "embedding_scale": True,
            "encodes_source": True,
            "cross_attention": True,
            "padding_side": "right",
            "beyond_max_len": "works",
        },
    )


right = subject(this_slab, "documents")
wrong = subject(first_slab, "documents-first-slab")


def reference(m, source, target, source_mask, target_mask, heads):
    p = {k: v.double() for k, v in m.named_parameters()}
    D = m.d_model
    K = D // heads

    def emb(ids):
        x = p["lut.weight"][ids] * D**0.5
        for i in range(D):
            a = torch.arange(ids.shape[1]).double() / 10000.0 ** ((i - i % 2) / D)
            x[..., i] = x[..., i] + (a.cos() if i % 2 else a.sin())
        return x

    def mha(x, y, n, see):
        q, k, v = x @ p[n + ".W_q.weight"].T, y @ p[n + ".W_k.weight"].T, y @ p[n + ".W_v.weight"].T
        o = [(q[..., a : a + K] @ k[..., a : a + K].mT / K**0.5).masked_fill(~see, -torch.inf).softmax(-1).nan_to_num(0) @ v[..., a : a + K] for a in range(0, D, K)]
        return torch.cat(o, -1) @ p[n + ".W_o.weight"].T

    ln = lambda h, n: F.layer_norm(h, (D,), p[n + ".weight"], p[n + ".bias"])
    ff = lambda h, n: (h @ p[n + ".0.weight"].T + p[n + ".0.bias"]).relu() @ p[n + ".2.weight"].T + p[n + ".2.bias"]
    y, x = emb(source), emb(target)
    for i in range(len(m.encoder)):
        n = f"encoder.{i}"
        y = ln(y + mha(y, y, n + ".attn", source_mask[:, None]), n + ".norm.0")
        y = ln(y + ff(y, n + ".ff"), n + ".norm.1")
    see = torch.ones(target.shape[1], target.shape[1]).tril().bool() & target_mask[:, None]
    for i in range(len(m.decoder)):
        n = f"decoder.{i}"
        x = ln(x + mha(x, x, n + ".attn", see), n + ".norm.0")
        x = ln(x + mha(x, y, n + ".cross", source_mask[:, None]), n + ".norm.1")
        x = ln(x + ff(x, n + ".ff"), n + ".norm.2")
    return x @ p["generator.weight"].T + p["generator.bias"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        good, bad = Transformer(11, 24, 3, 2, 40, this_slab), Transformer(11, 24, 3, 2, 40, first_slab)
        bad.load_state_dict(good.state_dict())
        for S, T, same in [(5, 7, True), (64, 70, True), (65, 4, False), (100, 9, False), (200, 30, False)]:
            source, target = torch.randint(11, (3, S)), torch.randint(11, (3, T))
            sm = torch.arange(S) < torch.tensor([[S], [S - S // 10 - 1], [0]])
            tm = torch.rand(3, T) > 0.2
            ones = torch.ones_like(sm)
            want = reference(good, source, target, sm, tm, 3)
            assert (good(source, target, sm, tm) - want).abs().max() < 1e-4
            off = (bad(source, target, sm, tm) - want).abs().max()
            assert (off < 1e-4) == same and (same or off > 1e-3), (S, T, off)
            d = Transformer(11, 24, 3, 2, 40, this_slab).double()
            d.load_state_dict(good.state_dict())
            assert (d(source, target, sm, tm) - want).abs().max() < 1e-10
            want = reference(good, source, target, ones, tm, 3)
            for m in (good, bad):
                assert (m(source, target, None, tm) - want).abs().max() < 1e-4
    print("ok", __file__)
