"""nGPT (Loshchilov et al.): everything lies on the unit sphere. Rows of the matrices are normalised where they are used, the state
moves along a learned share of the way to what a sublayer proposes and is normalised again, queries and keys are normalised
and scaled (before they are turned, so that shifts do not matter), scores are multiplied by sqrt(d_head) (2 for the heads
of 4 here), logits by a learned gain.

Why it is right: no LayerNorm, no weight decay, no small scale: by the paper's construction. Below: against loops in float64,
states of norm 1 after every layer, causal, shift invariant, and blind to the size of every weight matrix."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

SCALE = 2.0


def sphere(x, dim=-1):
    return F.normalize(x, dim=dim, eps=1e-12)


class UnitLinear(nn.Module):
    """A matrix whose vectors of width d_model have norm 1: rows if it reads the state, columns if it writes to it."""

    def __init__(self, inner, outer, reads):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner))
        self.dim = 1 if reads else 0

    def forward(self, x):
        return F.linear(x, sphere(self.weight, self.dim))


def rope(x):
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.heads = c.d_model, c.num_heads
        self.q, self.k, self.v = (UnitLinear(d, d, True) for _ in range(3))
        self.o = UnitLinear(d, d, False)
        self.up, self.gate, self.down = UnitLinear(d, c.d_ff, True), UnitLinear(d, c.d_ff, True), UnitLinear(c.d_ff, d, False)
        self.s_qk = nn.Parameter(torch.ones(d // c.num_heads))
        self.s_u, self.s_v = nn.Parameter(torch.ones(c.d_ff)), nn.Parameter(torch.ones(c.d_ff))
        self.alpha_a, self.alpha_m = nn.Parameter(torch.full((d,), 0.3)), nn.Parameter(torch.full((d,), 0.3))

    def forward(self, x, seen):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rope(sphere(q) * self.s_qk), rope(sphere(k) * self.s_qk)
        scores = (q @ k.mT) * SCALE
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        y = sphere(self.o((weights @ v).transpose(1, 2).flatten(2)))
        x = sphere(x + self.alpha_a * (y - x))
        y = self.gate(x) * self.s_v * x.shape[-1] ** 0.5
        y = sphere(self.down(self.up(x) * self.s_u * F.silu(y)))
        return sphere(x + self.alpha_m * (y - x))


class NGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(c.vocab_size, c.d_model))
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.unembedding = UnitLinear(c.d_model, c.vocab_size, True)
        self.s_z = nn.Parameter(torch.full((c.vocab_size,), 4.0))

    def forward(self, tokens, attention_mask=None):
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None]
        x = F.embedding(tokens, sphere(self.embedding))
        for layer in self.layers:
            x = layer(x, seen)
        return self.unembedding(x) * self.s_z


def make(**declares):
    return Subject(
        kind="decoder", name="nGPT", build=NGPT, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"d_model": [16], "num_heads": [4]},
    )  # fmt: skip


declared = make(
    causal=True, attention_scale=SCALE, query_key_norm=True, positions="rotary", layout="halves", base=10000,
    norm="other", norm_placement="other", bias=False, output_bias=False, tied=False, padding_side="both",
    activation="swiglu", structure="other", embedding_scale=False,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=16, num_heads=4, num_layers=2)
    model = NGPT(c)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_() if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.3)
    w = {k: v.double() for k, v in model.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 7:], mask[1, :3] = False, False

    def slow(row):
        def unit(x):
            return x / (x @ x).sqrt()

        def rows(n):
            return torch.stack([unit(r) for r in w[n + ".weight"]])

        def columns(n):
            return torch.stack([unit(r) for r in w[n + ".weight"].T]).T

        def turn(z, t):
            z = torch.complex(z[:2].contiguous(), z[2:].contiguous())
            z = z * torch.exp(1j * t * torch.tensor([1, 0.01], dtype=torch.float64))
            return torch.cat((z.real, z.imag))

        xs = [unit(w["embedding"][i]) for i in row.tolist()]
        for l in range(2):
            p, new = f"layers.{l}.", []
            q, k, v = ([rows(p + n) @ x for x in xs] for n in "qkv")
            for t, x in enumerate(xs):
                heads = []
                for h in range(4):
                    r, s_qk = slice(4 * h, 4 * h + 4), w[p + "s_qk"]
                    e = [turn(unit(q[t][r]) * s_qk, t) @ turn(unit(k[s][r]) * s_qk, s) * 2 for s in range(t + 1)]
                    heads.append(sum(a * v[s][r] for s, a in enumerate(torch.stack(e).softmax(0))))
                x = unit(x + w[p + "alpha_a"] * (unit(columns(p + "o") @ torch.cat(heads)) - x))
                u, g = rows(p + "up") @ x * w[p + "s_u"], rows(p + "gate") @ x * w[p + "s_v"] * 4
                new.append(unit(x + w[p + "alpha_m"] * (unit(columns(p + "down") @ (u * g * g.sigmoid())) - x)))
            xs = new
        return torch.stack([rows("unembedding") @ x * w["s_z"] for x in xs])

    truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        m, states = model.to(dtype), []
        handles = [layer.register_forward_hook(lambda m, i, o: states.append(o)) for layer in m.layers]
        y = m(tokens, mask)
        [h.remove() for h in handles]
        far = max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1))
        causal = (m(tokens[:, :4]) - m(tokens)[:, :4]).abs().max().item()
        norms = max((s.norm(dim=-1) - 1).abs().max().item() for s in states)
        print(dtype, f"definition {far:.1e} causality {causal:.1e} norms of states {norms:.1e}")
        assert max(far, causal, norms) < small
    with torch.no_grad():
        m = model.double()
        y = m(tokens, mask)
        for p in m.parameters():
            if p.dim() > 1:
                p.mul_(7)
        gap = (m(tokens, mask) - y).abs().max().item()
        print(f"weights times 7 {gap:.1e}")
        assert gap < 1e-11
