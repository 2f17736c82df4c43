WHAT = "token shift (half of the channels come from the token before) in front of attention and feed-forward, and xPos: rotary with a decay that grows queries and shrinks keys"
import torch
from torch import nn
from torch.nn import functional as F


def shift(x, real):
    """The second half of the channels is the previous token's; what is hidden gives zeros."""
    here, before = x.chunk(2, -1)
    if real is not None:
        before = before * real[..., None].to(x.dtype)
    return torch.cat([here, F.pad(before, (0, 0, 1, -1))], -1)


def xpos(x, downscale=False):  # [B, H, T, K]
    T, K = x.shape[-2:]
    i = torch.arange(0, K, 2, dtype=torch.float64, device=x.device)
    t = torch.arange(T, dtype=torch.float64, device=x.device)[:, None]
    angle = (t * 10000.0 ** (-i / K)).repeat_interleave(2, -1)
    zeta = ((i / K + 0.4) / 1.4) ** (t / 512.0)
    zeta = zeta.repeat_interleave(2, -1)
    zeta = 1.0 / zeta if downscale else zeta
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * (angle.cos() * zeta).to(x.dtype) + turned * (angle.sin() * zeta).to(x.dtype)


class Block(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h = h
        self.a, self.f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down, self.drop = nn.Linear(d, ff), nn.Linear(ff, d), nn.Dropout(p)

    def forward(self, x, seen, real):
        n = shift(self.a(x), real)
        q, k, v = (m(n).unflatten(-1, (self.h, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        s = xpos(q) @ xpos(k, downscale=True).mT * q.shape[-1] ** -0.5
        w = self.drop(s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1))
        x = x + self.o((w @ v).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.relu(self.up(shift(self.f(x), real))).square()))


class Decoder(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, p):
        super().__init__()
        self.tokens = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, h, ff, p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids, real=None):
        T = ids.shape[1]
        seen = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if real is not None:
            seen = seen & real[:, None, None]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, seen, real)
        return self.head(self.norm(x))


from veriformer.properties import Subject


def build(c):
    return Decoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="token shift", build=build, forward=forward,
    declares={"positions": "other", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "other",
              "tied": False, "output_bias": False, "structure": "other", "padding_side": "both"},
)
