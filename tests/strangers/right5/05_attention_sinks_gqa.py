WHAT = "gpt-oss: a learned sink logit per head in the softmax, grouped queries folded into the query rows, NTK-scaled rotary base, clamped SwiGLU with alpha 1.702 and up + 1"
import torch
from torch import nn

BASE = 640000.0  # 10000 * 8 ** (4 / 2)


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x):
        t = x.to(torch.promote_types(x.dtype, torch.float32))
        t = t * torch.rsqrt(torch.mean(t**2, dim=-1, keepdim=True) + 1e-5)
        return (t * self.scale.to(t.dtype)).to(x.dtype)


def rotary(x, cos, sin):  # x [B, T, *, K], halves
    a, b = torch.chunk(x, 2, dim=-1)
    shape = (1, x.shape[1]) + (1,) * (x.ndim - 3) + (-1,)
    cos, sin = cos.view(shape).to(x.dtype), sin.view(shape).to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, d, h, g):
        super().__init__()
        self.h, self.g, self.k = h, g, d // h
        self.norm = RMSNorm(d)
        self.sinks = nn.Parameter(torch.randn(h) * 0.5)
        self.qkv = nn.Linear(d, (h + 2 * g) * self.k)
        self.out = nn.Linear(h * self.k, d)

    def forward(self, x, cos, sin, hidden):
        B, T, _ = x.shape
        m = self.h // self.g
        q, k, v = self.qkv(self.norm(x)).split([self.h * self.k, self.g * self.k, self.g * self.k], -1)
        q = rotary(q.view(B, T, self.g, m, self.k), cos, sin)
        k = rotary(k.view(B, T, self.g, self.k), cos, sin)
        v = v.view(B, T, self.g, self.k)
        scores = torch.einsum("bqgmk,bsgk->bgmqs", q, k) / self.k**0.5
        scores = scores.masked_fill(hidden[:, None, None], torch.finfo(scores.dtype).min)
        sinks = self.sinks.view(1, self.g, m, 1, 1).expand(B, -1, -1, T, 1).to(scores.dtype)
        w = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        return x + self.out(torch.einsum("bgmqs,bsgk->bqgmk", w, v).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, d, ff):
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(d), nn.Linear(d, 2 * ff), nn.Linear(ff, d)

    def forward(self, x):
        h = self.up(self.norm(x))
        gate, linear = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
        return x + self.down(gate * torch.sigmoid(1.702 * gate) * (linear + 1))


class Model(nn.Module):
    def __init__(self, vocab, d, h, g, layers, ff):
        super().__init__()
        self.k = d // h
        self.embedding = nn.Embedding(vocab, d)
        self.block = nn.ModuleList(nn.ModuleDict({"attn": Attention(d, h, g), "mlp": MLP(d, ff)}) for _ in range(layers))
        self.norm, self.unembedding = RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        i = torch.arange(T, device=ids.device)
        hidden = (i[None, :] > i[:, None]).expand(B, T, T)
        if mask is not None:
            hidden = hidden | ~mask[:, None, :]
        angle = torch.outer(i.double(), BASE ** (-torch.arange(0, self.k, 2, device=ids.device).double() / self.k))
        x = self.embedding(ids)
        for block in self.block:
            x = block["mlp"](block["attn"](x, angle.cos(), angle.sin(), hidden))
        return self.unembedding(self.norm(x))


from veriformer.properties import Subject


def build(c):
    return Model(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="attention sinks", build=build, forward=forward,
    declares={"sink": True, "positions": "rotary", "layout": "halves", "base": BASE, "grouped_queries": True, "norm": "rms",
              "norm_placement": "pre", "final_norm": True, "tied": False, "output_bias": False, "activation": "other",
              "structure": "other", "padding_side": "both"},
)
