"""An encoder-decoder that sorts its sources by length and encodes only as many columns as the longest real source has
(the habit of recurrent models, carried on in a translation company's code), then brings the rows back in order."""

import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The rows of the memory are brought back with the sorting order itself rather than its inverse. Swaps are their own "
    "inverse, so batches of one and two are right, and so is any batch sorted already; a batch of three whose lengths "
    "are a cycle away from sorted gives samples one another's memory."
)
PLACE = "Wrong.unsort: memory[order]"


class Attend(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.q, self.kv, self.o = heads, nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, memory, allowed):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(memory).view(b, memory.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights * allowed  # a row without a key gives zeros
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        d = c.d_model
        self.own, self.n1, self.n3 = Attend(d, c.num_heads), nn.LayerNorm(d), nn.LayerNorm(d)
        if cross:
            self.cross, self.n2 = Attend(d, c.num_heads), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d))

    def forward(self, x, allowed, memory=None, visible=None):
        h = self.n1(x)
        x = x + self.own(h, h, allowed)
        if memory is not None:
            x = x + self.cross(self.n2(x), memory, visible)
        return x + self.mlp(self.n3(x))


class Translator(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d = c.d_model
        self.source, self.target = nn.Embedding(c.vocab_size, self.d), nn.Embedding(c.vocab_size, self.d)
        self.encoder = nn.ModuleList(Layer(c, False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Layer(c, True) for _ in range(c.num_layers))
        self.done, self.last, self.out = nn.LayerNorm(self.d), nn.LayerNorm(self.d), nn.Linear(self.d, c.vocab_size)

    def place(self, x):
        t, d = x.shape[1:]
        rate = torch.exp(torch.arange(0, d, 2, dtype=torch.float64, device=x.device) * (-math.log(10000.0) / d))
        angle = torch.arange(t, dtype=torch.float64, device=x.device)[:, None] * rate
        return x + torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :d].to(x.dtype)

    def encode(self, source, mask):
        """Memory of as many columns as `mask` leaves, `[B, S', D]`."""
        x = self.place(self.source(source))
        for layer in self.encoder:
            x = layer(x, mask[:, None, None])
        return self.done(x)

    def unsort(self, memory, order):
        return memory[torch.argsort(order)]

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is None:
            mask = torch.ones_like(source, dtype=torch.bool)
            memory = self.encode(source, mask)
        else:
            mask = source_mask.bool()
            ends = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)  # column after the last real one
            order = torch.argsort(ends, descending=True, stable=True)
            longest = max(1, int(ends.max()))
            memory = self.unsort(self.encode(source[order, :longest], mask[order, :longest]), order)
            mask = mask[:, :longest]
        t = target.shape[1]
        past = torch.ones(t, t, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            past = past & target_mask.bool()[:, None, None]
        x = self.place(self.target(target))
        for layer in self.decoder:
            x = layer(x, past, memory, mask[:, None, None])
        return self.out(self.last(x))


class Wrong(Translator):
    def unsort(self, memory, order):
        return memory[order]


def make(cls):
    return Subject(
        kind="encoder_decoder",
        name="translator",
        build=cls,
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
        declares={"positions": "sinusoidal", "norm_placement": "pre", "padding_side": "right", "tied": False},
    )


right, wrong = make(Translator), make(Wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        good, bad = Translator(DrawnConfig()).to(dtype), Wrong(DrawnConfig()).to(dtype)
        bad.load_state_dict(good.state_dict())
        for lengths in ([5], [3, 8], [8, 3], [9, 6, 4], [4, 9, 6], [6, 4, 9], [9, 4, 6], [2, 9, 7, 4]):
            n = len(lengths)
            source, target = torch.randint(0, 11, (n, 9)), torch.randint(0, 11, (n, 6))
            mask = torch.arange(9)[None] < torch.tensor(lengths)[:, None]
            alone = torch.cat([good(source[i : i + 1, :s], target[i : i + 1]) for i, s in enumerate(lengths)])
            e = [(m(source, target, mask) - alone).abs().max().item() for m in (good, bad)]
            print(dtype, lengths, "batch less alone", [f"{x:.1e}" for x in e])
            cycle = lengths in ([4, 9, 6], [6, 4, 9], [2, 9, 7, 4])
            assert e[0] < small and (e[1] > 0.05 if cycle else e[1] < small)
        changed = target.clone()
        changed[:, 4:] = 0
        assert (good(source, changed, mask) - good(source, target, mask))[:, :4].abs().max() < small
