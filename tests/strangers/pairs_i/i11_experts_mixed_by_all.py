"""A Mixtral layer: causal attention, then four experts of which each token gets two. The router hands out its weights for
the balance loss (`router`), and the experts run in a loop over those that were hit, as in Hugging Face's port."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The weights of the two chosen experts are divided by their sum in what the router reports, but the loop multiplies each "
    "expert by its share of all four: the experts' output is too small by the share of those that were not chosen, which is "
    "another factor at each token, and not what `router` says."
)
PLACE = "WrongLayer.mix"
EXPERTS, CHOSEN = 4, 2


class Expert(nn.Module):
    def __init__(self, d, inner):
        super().__init__()
        self.w1, self.w3 = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.w2 = nn.Linear(inner, d, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtralLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.heads = c.num_heads
        self.norm_1, self.norm_2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate = nn.Linear(d, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(d, c.d_ff) for _ in range(EXPERTS))

    def attend(self, x, attention_mask):
        h = self.norm_1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None]
        scores = q @ k.mT * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))

    def routed(self, h):
        """All shares `[N, E]`, those of the chosen divided by their sum `[N, 2]`, and who is chosen `[N, 2]`."""
        shares = F.softmax(self.gate(h), dim=-1, dtype=torch.promote_types(h.dtype, torch.float32))
        top, who = shares.topk(CHOSEN, dim=-1)
        return shares, top / top.sum(-1, keepdim=True), who

    def mix(self, shares, top, who, expert):
        rows, slot = (who == expert).nonzero(as_tuple=True)
        return rows, top[rows, slot]

    def forward(self, x, attention_mask=None):
        x = self.attend(x, attention_mask)
        h = self.norm_2(x).flatten(0, 1)
        routing = self.routed(h)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows, weight = self.mix(*routing, i)
            out = out.index_add(0, rows, (expert(h[rows]) * weight[:, None]).to(out.dtype))
        return x + out.view_as(x)

    def router_weights(self, x):
        h = self.norm_2(self.attend(x, None)).flatten(0, 1)
        shares, top, who = self.routed(h)
        return torch.zeros_like(shares).scatter(1, who, top).unflatten(0, x.shape[:2]).to(x.dtype)


class WrongLayer(MixtralLayer):
    def mix(self, shares, top, who, expert):
        rows, _ = (who == expert).nonzero(as_tuple=True)
        return rows, shares[rows, expert]


def make(cls):
    return Subject(
        kind="layer",
        name="mixtral layer",
        build=cls,
        forward=lambda layer, x, attention_mask=None: layer(x, attention_mask),
        router=lambda layer, x: layer.router_weights(x),
        declares={
            "causal": True, "norm_topk_prob": True, "positions": "none", "norm": "rms", "norm_placement": "pre",
            "residual": True, "bias": False, "structure": "other", "attention_scale": "1/sqrt(d_head)",
            "padding_side": "both",
        },
    )  # fmt: skip


right, wrong = make(MixtralLayer), make(WrongLayer)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0, 0.4)
    bad.load_state_dict(good.state_dict())
    x = torch.randn(2, 7, 12)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        good, bad, x = good.to(dtype), bad.to(dtype), x.to(dtype)
        far = []
        for m in (good, bad):
            routed, wide = m.router_weights(x), m.double()
            assert (routed.sum(-1) - 1).abs().max() < small and ((routed > 0).sum(-1) == 2).all()
            y = wide.attend(x.double(), None)
            h = wide.norm_2(y)
            dense = torch.stack([expert(h) for expert in wide.experts], -1)  # every expert on every token
            truth = y + (dense * wide.router_weights(x.double())[:, :, None]).sum(-1)
            m.to(dtype)
            far.append((m(x) - truth).abs().max().item())
            mask = torch.arange(7)[None] < torch.tensor([7, 4])[:, None]
            assert (m(x, mask)[1, :4] - m(x[1:, :4])[0]).abs().max() < small
            assert (m(x)[:, :3] - m(x[:, :3])).abs().max() < small
            branch = m(x) - m.attend(x, None)
            print(dtype, "size of the experts' branch", branch.norm().item())
        print(dtype, "right %.1e wrong %.2f" % tuple(far))
        assert far[0] < small and far[1] > 0.1
