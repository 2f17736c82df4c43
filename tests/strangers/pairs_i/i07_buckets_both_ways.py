"""T5 1.0 as a small port of mesh-tensorflow's: no scale on the scores, RMSNorm, ReLU, no biases, one table of relative
biases for the encoder and one for the decoder, used by all of their layers; the logits of the tied head are divided by
sqrt(d_model). Eight buckets, saturating at 20."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The decoder's relative positions go into buckets as the encoder's do, both ways: half of the table is kept for a future "
    "that the decoder never sees, and only four buckets are left for the past, so that distances 2 and 3 (and 4 to 6) "
    "get one bias where the eight buckets that are declared tell 0, 1, 2, 3 exactly."
)
PLACE = "WrongBias: bidirectional=True in the decoder"
BUCKETS, FAR = 8, 20


def relative_position_bucket(relative_position, bidirectional, num_buckets=BUCKETS, max_distance=FAR):
    ret = torch.zeros_like(relative_position)
    n = -relative_position
    if bidirectional:
        num_buckets //= 2
        ret = ret + (n < 0).long() * num_buckets
        n = n.abs()
    else:
        n = n.clamp(min=0)
    max_exact = num_buckets // 2
    large = torch.log(n.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    large = (max_exact + large.long()).clamp(max=num_buckets - 1)
    return ret + torch.where(n < max_exact, n, large)


class RelativeBias(nn.Module):
    def __init__(self, heads, causal):
        super().__init__()
        self.bidirectional = self.both_ways(causal)
        self.table = nn.Embedding(BUCKETS, heads)

    def both_ways(self, causal):
        return not causal

    def forward(self, length):
        at = torch.arange(length, device=self.table.weight.device)
        return self.table(relative_position_bucket(at[None] - at[:, None], self.bidirectional)).permute(2, 0, 1)


class WrongBias(RelativeBias):
    def both_ways(self, causal):
        return True


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * self.scale


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, memory, seen, bias=None):
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)) for f, y in ((self.q, x), (self.k, memory), (self.v, memory)))
        logits = torch.einsum("bthk,bshk->bhts", q, k)
        if bias is not None:
            logits = logits + bias
        weights = logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1) * seen
        return self.o(torch.einsum("bhts,bshk->bthk", weights, v).flatten(2))


class Layer(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        self.norms = nn.ModuleList(Norm(c.d_model) for _ in range(2 + cross))
        self.self_attention = Attention(c.d_model, c.num_heads)
        if cross:
            self.cross_attention = Attention(c.d_model, c.num_heads)
        self.wi, self.wo = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, seen, bias, memory=None, real=None):
        h = self.norms[0](x)
        x = x + self.self_attention(h, h, seen, bias)
        if memory is not None:
            x = x + self.cross_attention(self.norms[1](x), memory, real)
        return x + self.wo(F.relu(self.wi(self.norms[-1](x))))


class Stack(nn.Module):
    def __init__(self, c, causal, bias):
        super().__init__()
        self.causal = causal
        self.bias = bias(c.num_heads, causal)
        self.layers = nn.ModuleList(Layer(c, causal) for _ in range(c.num_layers))
        self.final = Norm(c.d_model)

    def forward(self, x, mask, memory=None, real=None):
        t = x.shape[1]
        seen = torch.ones(t, t, dtype=torch.bool, device=x.device)
        seen = seen.tril() if self.causal else seen
        if mask is not None:
            seen = seen & mask.bool()[:, None, None]
        bias = self.bias(t)
        for layer in self.layers:
            x = layer(x, seen, bias, memory, real)
        return self.final(x)


class T5(nn.Module):
    def __init__(self, c, bias):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder, self.decoder = Stack(c, False, bias), Stack(c, True, bias)

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is None:
            source_mask = torch.ones_like(source)
        memory = self.encoder(self.shared(source), source_mask)
        x = self.decoder(self.shared(target), target_mask, memory, source_mask.bool()[:, None, None])
        return F.linear(x * x.shape[-1] ** -0.5, self.shared.weight)


def make(bias):
    return Subject(
        kind="encoder_decoder",
        name="T5",
        build=lambda c: T5(c, bias),
        forward=lambda model, source, target, source_mask=None, target_mask=None: model(
            source, target, source_mask, target_mask
        ),
        declares={
            "positions": "t5", "num_buckets": BUCKETS, "max_distance": FAR, "attention_scale": 1, "norm": "rms",
            "norm_placement": "pre", "final_norm": True, "residual": True, "activation": "relu", "bias": False,
            "norm_bias": False, "output_bias": False, "tied": True, "embedding_scale": False, "padding_side": "both",
            "encodes_source": True,
        },
    )  # fmt: skip


right, wrong = make(RelativeBias), make(WrongBias)


if __name__ == "__main__":
    torch.manual_seed(0)
    # the buckets by their definition, one number at a time, in exact steps of the log
    def bucket(distance):
        if distance < 4:
            return distance
        return next((4 + j - 1 for j in range(1, 5) if distance < 4 * (FAR / 4) ** (j / 4) - 1e-9), BUCKETS - 1)

    past = torch.arange(60)
    assert relative_position_bucket(-past, False).tolist() == [bucket(p) for p in range(60)]
    assert relative_position_bucket(torch.tensor([-3, -2, 2, 3]), True).tolist() == [2, 2, 6, 6]
    c = DrawnConfig(num_layers=2)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.4)
        good.decoder.bias.table.weight.normal_(0, 1.5)
    bad.load_state_dict(good.state_dict())
    w = {k: v.double() for k, v in good.state_dict().items()}
    source, target = torch.randint(0, 11, (2, 6)), torch.randint(0, 11, (2, 12))
    ms, mt = torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 12, dtype=torch.bool)
    ms[1, :2] = False
    mt[1, 9:] = False

    def slow(src, tgt):
        def norm(x, n):
            return F.rms_norm(x, (8,), w[n + ".scale"], 1e-6)

        def attend(x, y, n, bias):
            pairs = ((x, "q"), (y, "k"), (y, "v"))
            q, k, v = ((z @ w[f"{n}.{p}.weight"].T).view(len(z), 2, 4).transpose(0, 1) for z, p in pairs)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias, scale=1.0)[0]
            return out.transpose(0, 1).flatten(1) @ w[n + ".o.weight"].T

        def stack(x, name, memory):
            t = len(x)
            bias = torch.zeros(2, t, t, dtype=torch.float64)
            for i in range(t):
                for j in range(t):
                    if memory is not None:
                        row = bucket(i - j) if j <= i else None
                    else:  # four buckets a side: 0, 1, [2, 6.3), beyond
                        row = sum(abs(i - j) >= e for e in (1, 2, 2 * 10**0.5)) + 4 * (j > i)
                    bias[:, i, j] = -torch.inf if row is None else w[name + ".bias.table.weight"][row]
            for l in range(2):
                p = f"{name}.layers.{l}."
                h = norm(x, p + "norms.0")
                x = x + attend(h, h, p + "self_attention", bias)
                if memory is not None:
                    x = x + attend(norm(x, p + "norms.1"), memory, p + "cross_attention", None)
                h = norm(x, p + ("norms.2" if memory is not None else "norms.1"))
                x = x + F.relu(h @ w[p + "wi.weight"].T) @ w[p + "wo.weight"].T
            return norm(x, name + ".final")

        memory = stack(w["shared.weight"][src], "encoder", None)
        return stack(w["shared.weight"][tgt], "decoder", memory) @ w["shared.weight"].T / 8**0.5

    truth = [slow(source[b][ms[b]], target[b][mt[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        far = []
        for m in (good, bad):
            y = m.to(dtype)(source, target, ms, mt)
            far.append(max((y[b][mt[b]] - truth[b]).abs().max().item() for b in (0, 1)))
            assert (m(source, target[:, :5]) - m(source, target)[:, :5]).abs().max() < small
        print(dtype, "right %.1e wrong %.2f" % tuple(far))
        assert far[0] < small and far[1] > 0.1
