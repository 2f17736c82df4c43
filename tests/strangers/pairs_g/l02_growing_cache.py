"""A small Llama, functional style: a dict of tensors, pure functions, and a key-value cache that grows in pages of 64."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WHAT = (
    "The key-value cache is enlarged by whole pages, and the chunk that makes it grow is written at the beginning of the new "
    "page instead of directly behind the last token: if a chunk straddles the page boundary, empty all-zero slots stay between "
    "and take part in attention from then on (token-by-token decoding fills each page exactly and is right)."
)
PLACE = "PagedFromBoundary.start_of"

PAGE = 64


class Paged:
    def __init__(self):
        self.k = self.v = self.bias = None
        self.length = 0  # slots in use

    def start_of(self, n, grown_from):
        return self.length

    def append(self, k, v, bias):
        """k, v [B,H,n,K]; bias [B,n] is added to the scores of these keys (0 or a very negative number)."""
        n = k.shape[2]
        grown_from = None
        if self.k is None:
            room = max(PAGE, -(-n // PAGE) * PAGE)
            self.k = k.new_zeros(*k.shape[:2], room, k.shape[3])
            self.v, self.bias = torch.zeros_like(self.k), bias.new_zeros(bias.shape[0], room)
        elif self.length + n > self.k.shape[2]:
            grown_from = self.k.shape[2]
            more = -(-(self.length + n - grown_from) // PAGE) * PAGE
            self.k, self.v = F.pad(self.k, (0, 0, 0, more)), F.pad(self.v, (0, 0, 0, more))
            self.bias = F.pad(self.bias, (0, more))
        start = self.start_of(n, grown_from)
        if start + n > self.k.shape[2]:
            self.k, self.v = F.pad(self.k, (0, 0, 0, PAGE)), F.pad(self.v, (0, 0, 0, PAGE))
            self.bias = F.pad(self.bias, (0, PAGE))
        self.k[:, :, start : start + n] = k
        self.v[:, :, start : start + n] = v
        self.bias[:, start : start + n] = bias
        self.length = start + n
        return self.k[:, :, : self.length], self.v[:, :, : self.length], self.bias[:, : self.length]


class PagedFromBoundary(Paged):
    def start_of(self, n, grown_from):
        return self.length if grown_from is None else grown_from


def rms(x, gain):
    return F.rms_norm(x, (x.shape[-1],), gain, 1e-5)


def rope(x, first):
    n, width = x.shape[-2:]
    w = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    a = torch.arange(first, first + n, dtype=torch.float64, device=x.device)[:, None] * w
    cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def attend(q, k, v, bias):
    n, s = q.shape[-2], k.shape[-2]
    future = torch.ones(n, s, dtype=torch.bool, device=q.device).triu(s - n + 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = future | (bias < 0)[:, None, None, :]
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0) @ v


class TinyLlama(nn.Module):
    cache_class = Paged

    def __init__(self, vocab, d, heads, layers, hidden):
        super().__init__()
        self.heads = heads
        self.tok = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": nn.RMSNorm(d, eps=1e-5),
                    "qkv": nn.Linear(d, 3 * d, bias=False),
                    "o": nn.Linear(d, d, bias=False),
                    "n2": nn.RMSNorm(d, eps=1e-5),
                    "gate": nn.Linear(d, hidden, bias=False),
                    "up": nn.Linear(d, hidden, bias=False),
                    "down": nn.Linear(hidden, d, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.head = nn.Linear(d, vocab, bias=False)

    def run(self, x, first, mask, caches):
        b, n, d = x.shape
        if mask is None:
            mask = torch.ones(b, first + n, dtype=torch.bool, device=x.device)
        bias = torch.where(mask.bool()[:, first : first + n], 0.0, -1.0).to(x.dtype)
        for layer, cache in zip(self.layers, caches):
            q, k, v = layer["qkv"](rms(x, layer["n1"].weight)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k = rope(q, first), rope(k, first)
            keys = (k, v, bias) if cache is None else cache.append(k, v, bias)
            x = x + layer["o"](attend(q, *keys).transpose(1, 2).reshape(b, n, d))
            h = rms(x, layer["n2"].weight)
            x = x + layer["down"](F.silu(layer["gate"](h)) * layer["up"](h))
        return self.head(rms(x, self.norm.weight))

    def forward(self, tokens, attention_mask=None):
        return self.run(self.tok(tokens), 0, attention_mask, [None] * len(self.layers))

    @torch.no_grad()
    def in_chunks(self, chunks, attention_mask=None):
        caches, first, out = [self.cache_class() for _ in self.layers], 0, []
        for chunk in chunks:
            out.append(self.run(self.tok(chunk), first, attention_mask, caches))
            first += chunk.shape[1]
        return torch.cat(out, 1)

    @torch.no_grad()
    def greedy(self, tokens, steps, use_cache):
        caches = [self.cache_class() for _ in self.layers] if use_cache else [None] * len(self.layers)
        fed = 0
        for _ in range(steps):
            logits = self.run(self.tok(tokens[:, fed:]), fed, None, caches)
            fed = tokens.shape[1] if use_cache else 0
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens


class TinyLlamaBoundary(TinyLlama):
    cache_class = PagedFromBoundary


FACTS = {
    "causal": True,
    "positions": "rotary",
    "layout": "interleaved",
    "base": 10000,
    "attention_scale": "1/sqrt(d_head)",
    "norm": "rms",
    "norm_placement": "pre",
    "final_norm": True,
    "residual": True,
    "activation": "swiglu",
    "bias": False,
    "output_bias": False,
    "tied": False,
    "embedding_scale": False,
    "padding_side": "both",
    "beyond_max_len": "works",
}


def subject(cls, name):
    return Subject(
        kind="decoder",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        name=name,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        embed=lambda m, x, attention_mask=None: m.run(x, 0, attention_mask, [None] * len(m.layers)),
        cache=lambda m, chunks, attention_mask=None: m.in_chunks(chunks, attention_mask),
        generate=lambda m, tokens, steps, use_cache: m.greedy(tokens, steps, use_cache),
        domain={"d_model": [16, 32, 48], "num_heads": [2, 4]},
        declares=FACTS,
        mask_forms=("padding",),
    )


right = subject(TinyLlama, "paged")
wrong = subject(TinyLlamaBoundary, "paged-boundary")


def reference(m, tokens, mask=None):
    p = {n: t.double() for n, t in m.named_parameters()}
    x = p["tok.weight"][tokens]
    B, T, D = x.shape
    K = D // m.heads
    norm = lambda h, g: h / (h.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * g
    see = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
    see = see if mask is None else see & mask[:, None]
    turn = torch.polar(torch.ones(T, K // 2).double(), torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(K // 2).double() * 2 / K))
    for i in range(len(m.layers)):
        g = lambda n: p[f"layers.{i}.{n}.weight"]
        h = norm(x, g("n1"))
        mixed = []
        for head in range(m.heads):
            q, k, v = (h @ g("qkv")[j * D + head * K : j * D + (head + 1) * K].T for j in range(3))
            q, k = (torch.view_as_real(torch.view_as_complex(u.reshape(B, T, -1, 2)) * turn).reshape(B, T, K) for u in (q, k))
            s = (q @ k.mT / K**0.5).masked_fill(~see, -torch.inf)
            mixed.append(s.softmax(-1).nan_to_num(0.0) @ v)
        x = x + torch.cat(mixed, -1) @ g("o").T
        h = norm(x, g("n2"))
        x = x + (F.silu(h @ g("gate").T) * (h @ g("up").T)) @ g("down").T
    return norm(x, p["norm.weight"]) @ p["head.weight"].T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good = TinyLlama(23, 48, 4, 3, 40)
    bad = TinyLlamaBoundary(23, 48, 4, 3, 40)
    for p in good.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    bad.load_state_dict(good.state_dict())
    for T in (3, 50, 150):
        tokens = torch.randint(23, (2, T))
        mask = torch.rand(2, T) > 0.3
        for m in (good, bad):
            assert (m(tokens, mask) - reference(m, tokens, mask)).abs().max() < 1e-4
            assert (m(tokens) - reference(m, tokens)).abs().max() < 1e-4
        d = TinyLlama(23, 48, 4, 3, 40).double()
        d.load_state_dict(good.state_dict())
        assert (d(tokens, mask) - reference(d, tokens, mask)).abs().max() < 1e-10
    for sizes, same in [((3, 2), True), ((20, 20, 10), True), ((60,) + (1,) * 10, True), ((64, 10), True), ((100,) + (1,) * 40, True), ((60, 10), False), ((30, 30, 30), False), ((100, 50), False)]:
        tokens = torch.randint(23, (2, sum(sizes)))
        mask = torch.rand(2, sum(sizes)) > 0.2
        want = reference(good, tokens, mask)
        assert (good.in_chunks(tokens.split(sizes, 1), mask) - want).abs().max() < 1e-4
        off = (bad.in_chunks(tokens.split(sizes, 1), mask) - want).abs().max()
        assert (off < 1e-4) == same and (same or off > 1e-2), (sizes, off)
    tokens = torch.randint(23, (2, 20))
    assert torch.equal(good.greedy(tokens, 30, True), good.greedy(tokens, 30, False))
    print("ok", __file__)
