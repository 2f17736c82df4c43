"""BERT-size-agnostic encoder with a "memory-efficient attention" for long inputs (after Rabe & Staats, 2021), plain functions."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WHAT = (
    "For inputs longer than 64 keys are taken in chunks of 32; the last chunk is filled up with zero keys, and the mask is "
    "filled up with True instead of False, so that up to 31 zero keys take part in the softmax unless the length is a "
    "multiple of 32."
)
PLACE = "pad_keys_visible"

LONG = 64
CHUNK = 32


def pad_keys(k, v, keep, extra):
    return F.pad(k, (0, 0, 0, extra)), F.pad(v, (0, 0, 0, extra)), F.pad(keep, (0, extra), value=False)


def pad_keys_visible(k, v, keep, extra):
    return F.pad(k, (0, 0, 0, extra)), F.pad(v, (0, 0, 0, extra)), F.pad(keep, (0, extra), value=True)


def full_attention(q, k, v, keep):
    hide = ~keep[:, None, None, :]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(hide, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hide, 0) @ v


def chunked_attention(q, k, v, keep, pad):
    """Running softmax over chunks of keys. Peak memory is T * CHUNK rather than T * T."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v, keep = pad(k, v, keep, -k.shape[2] % CHUNK)
    q = q / math.sqrt(q.shape[-1])
    top = torch.full(q.shape[:3], torch.finfo(wide).min, dtype=wide, device=q.device)
    norm = torch.zeros_like(top)
    acc = torch.zeros(q.shape[:3] + v.shape[-1:], dtype=wide, device=q.device)
    for start in range(0, k.shape[2], CHUNK):
        now = slice(start, start + CHUNK)
        hide = ~keep[:, None, None, now]
        scores = (q @ k[:, :, now].transpose(-2, -1)).to(wide).masked_fill(hide, torch.finfo(wide).min)
        new_top = torch.maximum(top, scores.detach().amax(-1))
        p = (scores - new_top[..., None]).exp().masked_fill(hide, 0)
        fade = (top - new_top).exp()
        norm = norm * fade + p.sum(-1)
        acc = acc * fade[..., None] + p @ v[:, :, now].to(wide)
        top = new_top
    return (acc / norm.masked_fill(norm == 0, 1)[..., None]).to(v.dtype)


def sinusoids(length, dim, device):
    at = torch.arange(length, dtype=torch.float64, device=device)[:, None]
    rate = torch.exp(-math.log(10000.0) * torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    return torch.stack([torch.sin(at * rate), torch.cos(at * rate)], -1).flatten(1)[:, :dim]


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden, pad):
        super().__init__()
        self.heads, self.pad = heads, pad
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.ln_attention, self.ln_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x, keep):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if x.shape[1] > LONG:
            a = chunked_attention(q, k, v, keep, self.pad)
        else:
            a = full_attention(q, k, v, keep)
        x = self.ln_attention(x + self.o(a.transpose(1, 2).flatten(2)))
        return self.ln_mlp(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, pad):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, heads, hidden, pad) for _ in range(layers))

    def encode(self, x, attention_mask=None):
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask.bool()
        x = x + sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)
        for layer in self.layers:
            x = layer(x, keep)
        return x

    def forward(self, tokens, attention_mask=None):
        return self.encode(self.emb(tokens), attention_mask)


def subject(pad, name):
    return Subject(
        kind="encoder",
        build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, pad),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        embed=lambda m, x, attention_mask=None: m.encode(x, attention_mask),
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "sinusoidal",
            "layout": "interleaved",
            "base": 10000,
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "post",
            "final_norm": False,
            "residual": True,
            "activation": "gelu",
            "bias": True,
            "embedding_scale": False,
            "padding_side": "right",
            "beyond_max_len": "works",
        },
    )


right = subject(pad_keys, "rabe-staats")
wrong = subject(pad_keys_visible, "rabe-staats-visible")


def reference(m, tokens, mask):
    p = {k: v.double() for k, v in m.named_parameters()}
    x = p["emb.weight"][tokens]
    B, T, D = x.shape
    at = torch.arange(T).double()
    for i in range(D):
        angle = at * 10000.0 ** (-(i - i % 2) / D)
        x[..., i] = x[..., i] + (angle.cos() if i % 2 else angle.sin())
    for i, layer in enumerate(m.layers):
        w = lambda n: (p[f"layers.{i}.{n}.weight"], p[f"layers.{i}.{n}.bias"])
        q, k, v = (F.linear(x, *w(n)) for n in "qkv")
        K = D // layer.heads
        o = []
        for a in range(0, D, K):
            s = (q[..., a : a + K] @ k[..., a : a + K].mT / K**0.5).masked_fill(~mask[:, None], -torch.inf)
            o.append(s.softmax(-1).nan_to_num(0) @ v[..., a : a + K])
        x = F.layer_norm(x + F.linear(torch.cat(o, -1), *w("o")), (D,), *w("ln_attention"))
        x = F.layer_norm(x + F.linear(F.gelu(F.linear(x, *w("up"))), *w("down")), (D,), *w("ln_mlp"))
    return x


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = Encoder(11, 24, 3, 2, 40, pad_keys), Encoder(11, 24, 3, 2, 40, pad_keys_visible)
    bad.load_state_dict(good.state_dict())
    with torch.no_grad():
        for T, same in [(1, True), (33, True), (64, True), (96, True), (128, True), (65, False), (90, False), (200, False)]:
            tokens = torch.randint(11, (3, T))
            ones = torch.ones(3, T, dtype=torch.bool)
            some = ones.clone()
            some[1, (T + 1) // 2 :] = False
            some[2] = False
            for mask in (ones, some):
                want = reference(good, tokens, mask)
                assert (good(tokens, mask) - want).abs().max() < 1e-4
                off = (bad(tokens, mask) - want).abs().max()
                assert (off < 1e-4) == same and (same or off > 3e-3), (T, off)
            assert torch.equal(good(tokens), good(tokens, ones))
            d = Encoder(11, 24, 3, 2, 40, pad_keys).double()
            d.load_state_dict(good.state_dict())
            assert (d(tokens, some) - want).abs().max() < 1e-10
    print("ok", __file__)
