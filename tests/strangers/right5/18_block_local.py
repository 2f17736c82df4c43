WHAT = "block-local attention: T is filled up to blocks of 4, each block sees itself and its neighbours, plus the first token seen by and seeing all (Longformer's global token); the fill is cut off again"
import torch
from torch import nn
from torch.nn import functional as F

BLOCK = 4


class Local(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.q_global = nn.Linear(d, d)

    def forward(self, x, real):
        B, T, D = x.shape
        N = -(-T // BLOCK)
        fill = N * BLOCK - T
        x, real = F.pad(x, (0, 0, 0, fill)), F.pad(real, (0, fill), value=False)
        q, k, v = self.qkv(x).view(B, N * BLOCK, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        scale = q.shape[-1] ** -0.5
        low = torch.finfo(q.dtype).min

        def around(t, value=0.0):  # [.., N * BLOCK, *] -> [.., N, 3 * BLOCK, *]
            t = t.unflatten(2, (N, BLOCK))
            t = F.pad(t, (0, 0, 0, 0, 1, 1), value=value)
            return torch.cat([t[:, :, :-2], t[:, :, 1:-1], t[:, :, 2:]], 3)

        local = torch.einsum("bhnik,bhnjk->bhnij", q.unflatten(2, (N, BLOCK)), around(k)) * scale
        at = torch.arange(N * BLOCK, device=x.device)
        usable = (real & (at > 0))[:, None, :, None].to(torch.uint8)  # the first token comes in as the global one
        local = local.masked_fill(around(usable)[:, :, :, None, :, 0] == 0, low)
        first = torch.einsum("bhtk,bhk->bht", q, k[:, :, 0]).unflatten(2, (N, BLOCK))[..., None] * scale
        first = first.masked_fill(~real[:, 0, None, None, None, None], low)
        w = torch.cat([first, local], -1).softmax(-1)
        y = w[..., :1] * v[:, :, 0, None, None] + torch.einsum("bhnij,bhnjk->bhnik", w[..., 1:], around(v))
        y = y.flatten(2, 3)[:, :, :T]
        g = self.q_global(x[:, 0]).view(B, self.h, -1)
        s = (torch.einsum("bhk,bhtk->bht", g, k) * scale).masked_fill(~real[:, None], low)
        y0 = torch.einsum("bht,bhtk->bhk", s.softmax(-1), v)[:, :, None]
        y = torch.cat([y0, y[:, :, 1:]], 2)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.a, self.f, self.local = nn.LayerNorm(d), nn.LayerNorm(d), Local(d, h)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Dropout(p), nn.Linear(ff, d))

    def forward(self, x, real):
        x = x + self.local(self.a(x), real)
        return x + self.ff(self.f(x))


class Encoder(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len, p):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers, self.norm = nn.ModuleList(Layer(d, h, ff, p) for _ in range(layers)), nn.LayerNorm(d)

    def forward(self, ids, mask=None):
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, real)
        return self.norm(x)


from veriformer.properties import Subject


def build(c):
    return Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="encoder", build=build, forward=forward)
declared = Subject(
    kind="encoder", name="block local", build=build, forward=forward,
    declares={"causal": False, "sparse": True, "positions": "learned", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu", "structure": "other", "padding_side": "right", "beyond_max_len": "error"},
)
