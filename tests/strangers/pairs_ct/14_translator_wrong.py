"""A small translation model, functional: every block is a dict of layers, one attend for all."""
import torch
from torch import nn

from veriformer.properties import Subject


def sinusoid(length, width, like):
    half = (width + 1) // 2
    rate = 10000.0 ** (-2.0 * torch.arange(half, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :width].to(like)


def visible(queries, keys, key_mask, device, causal=True):
    ok = torch.ones(queries, keys, dtype=torch.bool, device=device)
    ok = ok.tril() if causal else ok
    return ok[None, None] if key_mask is None else ok[None, None] & key_mask[:, None, None, :]


def attention(width):
    return nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "o")})


def attend(a, heads, x, memory, ok):
    q, k, v = (
        a[name](t).unflatten(-1, (heads, -1)).transpose(1, 2) for name, t in (("q", x), ("k", memory), ("v", memory))
    )
    s = q @ k.mT / q.shape[-1] ** 0.5
    w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1)
    return a["o"]((w @ v).transpose(1, 2).flatten(2))


def block(width, hidden, crosses):
    parts = {"n1": nn.LayerNorm(width), "self": attention(width), "n2": nn.LayerNorm(width)}
    parts["mlp"] = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
    if crosses:
        parts |= {"nx": nn.LayerNorm(width), "cross": attention(width)}
    return nn.ModuleDict(parts)


class Translator(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.table = nn.Embedding(c.vocab_size, c.d_model)
        self.enc = nn.ModuleList(block(c.d_model, c.d_ff, False) for _ in range(c.num_layers))
        self.dec = nn.ModuleList(block(c.d_model, c.d_ff, True) for _ in range(c.num_layers))
        self.enc_norm, self.dec_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def embed(self, tokens):
        x = self.table(tokens)
        return x + sinusoid(x.shape[1], x.shape[2], x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        S, T, device = source.shape[1], target.shape[1], source.device
        x = self.embed(source)
        ok = visible(S, S, source_mask, device, causal=False)
        for b in self.enc:
            n = b["n1"](x)
            x = x + attend(b["self"], self.heads, n, n, ok)
            x = x + b["mlp"](b["n2"](x))
        memory = self.enc_norm(x)
        y = self.embed(target)
        ok = visible(T, T, target_mask, device)
        across = visible(T, S, source_mask, device)
        for b in self.dec:
            n = b["n1"](y)
            y = y + attend(b["self"], self.heads, n, n, ok)
            y = y + attend(b["cross"], self.heads, b["nx"](y), memory, across)
            y = y + b["mlp"](b["n2"](y))
        return self.dec_norm(y) @ self.table.weight.T


subject = Subject(
    kind="encoder_decoder",
    name="translator",
    build=Translator,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"positions": "sinusoidal", "norm_placement": "pre", "padding_side": "right", "tied": True},
)

WHAT = "The mask of the cross-attention is made with the helper's default, causal (line 66): word t of the translation sees the first t + 1 source words alone."
