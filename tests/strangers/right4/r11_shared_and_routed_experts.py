"""A DeepSeekMoE encoder layer: one expert for every token, and the best two of five by a softmax over all; their weights are not
divided by their sum. Experts are one batch of matrices; tokens are sorted by expert and run in groups, then put back.
Talking heads (Shazeer et al.) mix the scores of the heads before the softmax and the weights after it.

Why it is right: sorting and putting back is a permutation, no expert has a capacity, so that a token's output depends on its own
sequence alone. Below: against every expert on every token, in float64, samples alone and in a batch, padding on both sides."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

EXPERTS, BEST = 5, 2


class TalkingHeads(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.before, self.after = (nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads)) for _ in range(2))

    def forward(self, x, real):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        scores = torch.einsum("bthk,bshk->bhts", q * q.shape[-1] ** -0.5, k)
        scores = torch.einsum("gh,bhts->bgts", self.before, scores)
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None], torch.finfo(scores.dtype).min)
        weights = torch.einsum("gh,bhts->bgts", self.after, scores.softmax(-1))
        return self.out(torch.einsum("bhts,bshk->bthk", weights, v).flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f = c.d_model, c.d_ff
        self.norm_1, self.norm_2, self.attention = nn.LayerNorm(d), nn.LayerNorm(d), TalkingHeads(d, c.num_heads)
        self.gate = nn.Linear(d, EXPERTS, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(EXPERTS, d, f) * 0.3), nn.Parameter(torch.randn(EXPERTS, f, d) * 0.3)
        self.always = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))

    def routed(self, h):
        shares = self.gate(h).softmax(-1)
        return shares.topk(BEST, -1)

    def experts(self, h):
        weights, who = self.routed(h)
        order = who.flatten().argsort(stable=True)
        counts = torch.bincount(who.flatten(), minlength=EXPERTS).tolist()
        groups = h[order // BEST].split(counts)
        done = torch.cat([F.gelu(x @ self.up[e]) @ self.down[e] for e, x in enumerate(groups)])
        done = done * weights.flatten()[order][:, None]
        return torch.zeros_like(done).index_copy(0, order, done).unflatten(0, (-1, BEST)).sum(1)

    def attended(self, x, mask):
        return x + self.attention(self.norm_1(x), None if mask is None else mask.bool())

    def forward(self, x, attention_mask=None):
        x = self.attended(x, attention_mask)
        h = self.norm_2(x)
        return x + self.always(h) + self.experts(h.flatten(0, 1)).view_as(h)

    def router(self, x):
        weights, who = self.routed(self.norm_2(self.attended(x, None)))
        return weights.new_zeros(*x.shape[:2], EXPERTS).scatter(-1, who, weights)


def make(**declares):
    return Subject(
        kind="layer", name="shared and routed experts", build=Layer, declares=declares,
        forward=lambda layer, x, attention_mask=None: layer(x, attention_mask),
        router=lambda layer, x: layer.router(x),
    )  # fmt: skip


declared = make(
    causal=False, positions="none", norm="layer", norm_placement="pre", residual=True, activation="gelu",
    norm_topk_prob=False, batch_coupled=False, attention_scale="1/sqrt(d_head)", padding_side="both", structure="other",
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    layer = Layer(DrawnConfig(d_model=12, num_heads=3))
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.normal_(float("norm" in name and name.endswith("weight")), 0.5)
    w = {k: v.double() for k, v in layer.state_dict().items()}
    x0 = torch.randn(3, 8, 12)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, 6:], mask[1, :3] = False, False

    def slow(x):
        def lin(y, n):
            return w[n + ".weight"] @ y + w[n + ".bias"]

        def norm(y, n):
            return F.layer_norm(y, (12,), w[n + ".weight"], w[n + ".bias"])

        f, out = [lin(norm(y, "norm_1"), "attention.qkv").view(3, 3, 4) for y in x], []
        for t, y in enumerate(x):
            scores = torch.stack([torch.stack([f[t][0, h] @ z[1, h] / 2 for z in f]) for h in range(3)])
            weights = w["attention.after"] @ (w["attention.before"] @ scores).softmax(1)
            y = y + lin(torch.cat([sum(a * z[2, h] for a, z in zip(weights[h], f)) for h in range(3)]), "attention.out")
            h = norm(y, "norm_2")
            shares = (w["gate.weight"] @ h).softmax(0)
            best = sorted(range(EXPERTS), key=lambda e: -shares[e])[:BEST]
            mixed = sum(shares[e] * (F.gelu(h @ w["up"][e]) @ w["down"][e]) for e in best)
            out.append(y + lin(F.gelu(lin(h, "always.0")), "always.2") + mixed)
        return torch.stack(out)

    truth = [slow(x0[b][mask[b]].double()) for b in range(3)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        m, x = layer.to(dtype), x0.to(dtype)
        y = m(x, mask)
        far = max((y[b][mask[b]] - truth[b]).abs().max().item() for b in range(3))
        alone = max((m(x[b : b + 1], mask[b : b + 1])[0] - y[b]).abs().max().item() for b in range(3))
        routes = m.router(x)
        print(dtype, f"definition {far:.1e} alone {alone:.1e}, sum of weights from {routes.sum(-1).min():.2f}")
        assert max(far, alone) < small and ((routes > 0).sum(-1) == BEST).all() and routes.sum(-1).max() < 1
