"""Gemma 2 in small: gains stored as 1 + g, embeddings times sqrt(d_model), norms before and after each sublayer, GeGLU,
grouped queries, a local layer and a global one in turn, capped scores (at 4 here) and capped logits (at 30)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The soft cap is applied to the raw products of queries and keys and the scale after it: scores are "
    "scale * 4 * tanh(qk / 4) instead of 4 * tanh(scale * qk / 4), so that they saturate earlier, at 4 / sqrt(d_head), and "
    "attention stays flatter than declared. Small scores are the same."
)
PLACE = "WrongAttention.scores"
CAP, LOGIT_CAP, LOCAL = 4.0, 30.0, 6


def soft_cap(x, cap):
    return cap * torch.tanh(x / cap)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c, local):
        super().__init__()
        self.h, self.g, self.size, self.local = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads, local
        self.qkv_proj = nn.Linear(c.d_model, (self.h + 2 * self.g) * self.size, bias=False)
        self.o_proj = nn.Linear(c.d_model, c.d_model, bias=False)

    def scores(self, q, k):
        return soft_cap((q * self.size**-0.5) @ k.mT, CAP)

    def forward(self, x, turn, mask):
        b, t, _ = x.shape
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.size)).transpose(1, 2).split((self.h, self.g, self.g), 1)
        q, k = turn(q), turn(k)
        k, v = (z.repeat_interleave(self.h // self.g, 1) for z in (k, v))
        at = torch.arange(t, device=x.device)
        seen = at[None] <= at[:, None]
        if self.local:
            seen = seen & (at[None] > at[:, None] - LOCAL)
        if mask is not None:
            seen = seen & mask[:, None, None]
        scores = self.scores(q, k)
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class WrongAttention(Attention):
    def scores(self, q, k):
        return soft_cap(q @ k.mT, CAP) * self.size**-0.5


class Block(nn.Module):
    def __init__(self, c, attention, local):
        super().__init__()
        self.attn = attention(c, local)
        self.gate_up, self.down = nn.Linear(c.d_model, 2 * c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)
        self.pre_attn, self.post_attn, self.pre_ffw, self.post_ffw = (RMSNorm(c.d_model) for _ in range(4))

    def forward(self, x, turn, mask):
        x = x + self.post_attn(self.attn(self.pre_attn(x), turn, mask))
        gate, up = self.gate_up(self.pre_ffw(x)).chunk(2, -1)
        return x + self.post_ffw(self.down(F.gelu(gate, approximate="tanh") * up))


class Gemma(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.embedder = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c, attention, local=i % 2 == 0) for i in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        mask = None if attention_mask is None else attention_mask.bool()
        x = self.embedder(tokens)
        x = x * x.shape[-1] ** 0.5
        size = self.layers[0].attn.size
        rate = 10000.0 ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float64) / size)
        angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None] * rate
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        def turn(y):
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        for layer in self.layers:
            x = layer(x, turn, mask)
        return soft_cap(F.linear(self.norm(x), self.embedder.weight), LOGIT_CAP)


def make(attention):
    return Subject(
        kind="decoder",
        name="gemma 2",
        build=lambda c: Gemma(c, attention),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"d_model": [16, 32], "num_heads": [4], "num_key_value_heads": [1, 2], "num_layers": [2, 3]},
        declares={
            "soft_cap": CAP, "attention_scale": "1/sqrt(d_head)", "embedding_scale": True, "norm": "rms",
            "norm_placement": "other", "final_norm": True, "positions": "rotary", "layout": "halves", "base": 10000,
            "activation": "other", "bias": False, "tied": True, "grouped_queries": True, "sparse": True,
            "padding_side": "both", "structure": "other",
        },
    )  # fmt: skip


right, wrong = make(Attention), make(WrongAttention)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=3)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(0, 0.5)
    bad.load_state_dict(good.state_dict())
    w = {k: v.double() for k, v in good.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, :3] = False

    def slow(row):
        def norm(x, n):
            return x / (x @ x / len(x) + 1e-6) ** 0.5 * (1 + w[n + ".weight"])

        def turned(z, t):
            out = z.clone()
            for i in range(2):
                angle = torch.tensor(t * 100.0**-i, dtype=torch.float64)
                out[i] = z[i] * angle.cos() - z[i + 2] * angle.sin()
                out[i + 2] = z[i + 2] * angle.cos() + z[i] * angle.sin()
            return out

        xs = [w["embedder.weight"][i] * 4.0 for i in row.tolist()]
        for l in range(3):
            p = f"layers.{l}."
            fused = [(w[p + "attn.qkv_proj.weight"] @ norm(x, p + "pre_attn")).view(8, 4) for x in xs]
            new = []
            for t, x in enumerate(xs):
                first = max(0, t - LOCAL + 1) if l % 2 == 0 else 0
                heads = []
                for h in range(4):
                    q = turned(fused[t][h], t)
                    z = torch.stack([q @ turned(fused[s][4 + h // 2], s) / 2 for s in range(first, t + 1)])
                    e = (4 * (z / 4).tanh()).softmax(0)
                    heads.append(sum(a * fused[s][6 + h // 2] for a, s in zip(e, range(first, t + 1))))
                new.append(x + norm(w[p + "attn.o_proj.weight"] @ torch.cat(heads), p + "post_attn"))
            xs = []
            for x in new:
                gate, up = (w[p + "gate_up.weight"] @ norm(x, p + "pre_ffw")).chunk(2)
                y = w[p + "down.weight"] @ (F.gelu(gate, approximate="tanh") * up)
                xs.append(x + norm(y, p + "post_ffw"))
        return torch.stack([30 * (w["embedder.weight"] @ norm(x, "norm") / 30).tanh() for x in xs])

    truth = slow(tokens[0]), slow(tokens[1, 3:])
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
        far = []
        for m in (good, bad):
            y = m.to(dtype)(tokens, mask)
            far.append(max((y[0] - truth[0]).abs().max().item(), (y[1, 3:] - truth[1]).abs().max().item()))
            assert (m(tokens[:, :6]) - m(tokens)[:, :6]).abs().max() < small
            assert (m(tokens[1:, 3:]) - y[1:, 3:]).abs().max() < small
            print(dtype, "spread", y.std().item())
        print(dtype, "right %.1e wrong %.2f" % tuple(far))
        assert far[0] < small and far[1] > 0.1
