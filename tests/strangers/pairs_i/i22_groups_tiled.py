"""One Llama block for a model-parallel server: einsum attention with grouped queries, views of its projections and its
attention weights for the tools that convert and inspect checkpoints."""

import torch
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Key-value heads are tiled (0 1 0 1) instead of each repeated (0 0 1 1): query heads 1 and 2 read the keys "
    "and values of the other group than the rows of the projections say. A block trained from scratch learns as well; with the weights of any "
    "Llama checkpoint, and as `projections` lays them out, half of the heads attend by foreign keys."
)
PLACE = "WrongBlock.expand"


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d, self.h, self.g = c.d_model, c.num_heads, c.num_key_value_heads
        self.k = self.d // self.h
        self.attn_norm, self.mlp_norm = nn.Parameter(torch.ones(self.d)), nn.Parameter(torch.ones(self.d))
        self.wq, self.wo = nn.Parameter(torch.empty(self.d, self.d)), nn.Parameter(torch.empty(self.d, self.d))
        self.wk = nn.Parameter(torch.empty(self.g * self.k, self.d))
        self.wv = nn.Parameter(torch.empty(self.g * self.k, self.d))
        self.w_gate, self.w_up = (nn.Parameter(torch.empty(c.d_ff, self.d)) for _ in range(2))
        self.w_down = nn.Parameter(torch.empty(self.d, c.d_ff))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.xavier_uniform_(p)

    def expand(self, x):
        return x.repeat_interleave(self.h // self.g, dim=1)

    def rope(self, x):
        freq = 10000.0 ** (-torch.arange(0, self.k, 2, dtype=torch.float64, device=x.device) / self.k)
        angle = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)[:, None] * freq
        cos, sin = (y.repeat(1, 2).to(x.dtype) for y in (angle.cos(), angle.sin()))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    def norm(self, x, gain):
        return F.rms_norm(x, (self.d,), gain, 1e-5)

    def attention(self, x, mask):
        x = self.norm(x, self.attn_norm)
        q = einsum("btd,hkd->bhtk", x, self.wq.view(self.h, self.k, self.d))
        k = einsum("btd,gkd->bgtk", x, self.wk.view(self.g, self.k, self.d))
        v = einsum("btd,gkd->bgtk", x, self.wv.view(self.g, self.k, self.d))
        q, k, v = self.rope(q), self.expand(self.rope(k)), self.expand(v)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            seen = seen & mask.bool()[:, None, None]
        scores = einsum("bhtk,bhsk->bhts", q, k) * self.k**-0.5
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        return weights, einsum("bhts,bhsk,dhk->btd", weights, v, self.wo.view(self.d, self.h, self.k))

    def forward(self, x, mask=None):
        x = x + self.attention(x, mask)[1]
        h = self.norm(x, self.mlp_norm)
        return x + (F.silu(h @ self.w_gate.T) * (h @ self.w_up.T)) @ self.w_down.T


class WrongBlock(Block):
    def expand(self, x):
        return x.repeat(1, self.h // self.g, 1, 1)


def make(cls):
    return Subject(
        kind="layer",
        name="llama block",
        build=cls,
        forward=lambda layer, x, attention_mask=None: layer(x, attention_mask),
        weights=lambda layer, x, attention_mask=None: layer.attention(x, attention_mask)[0],
        projections=lambda layer: {"q": layer.wq, "k": layer.wk, "v": layer.wv, "o": layer.wo},
        domain={"d_model": [8, 16], "num_heads": [4], "num_key_value_heads": [2]},
        declares={
            "causal": True, "grouped_queries": True, "positions": "rotary", "layout": "halves", "base": 10000,
            "norm": "rms", "norm_placement": "pre", "residual": True, "activation": "swiglu", "bias": False,
            "attention_scale": "1/sqrt(d_head)", "padding_side": "both",
        },
    )  # fmt: skip


right, wrong = make(Block), make(WrongBlock)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2)
    good, bad = right.build(c), wrong.build(c)
    bad.load_state_dict(good.state_dict())
    x0 = torch.randn(2, 8, 16)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, :2] = False

    def slow(x, m):
        w = {k: v.detach().double() for k, v in right.projections(m).items()}
        h = F.rms_norm(x, (16,), m.attn_norm.double(), 1e-5)
        out, kept = torch.zeros_like(x), torch.zeros(4, len(x), len(x), dtype=torch.float64)
        turn = torch.exp(1j * torch.arange(len(x))[:, None] * torch.tensor([1, 0.01], dtype=torch.float64))
        for i in range(4):
            own = slice(4 * (i // 2), 4 * (i // 2) + 4)  # consecutive query heads share
            q, k = h @ w["q"][4 * i : 4 * i + 4].T, h @ w["k"][own].T
            q, k = (torch.complex(y[:, :2].contiguous(), y[:, 2:].contiguous()) * turn for y in (q, k))
            s = (q @ k.mH).real / 2
            kept[i] = (s + torch.full_like(s, -torch.inf).triu(1)).softmax(-1)
            out = out + kept[i] @ (h @ w["v"][own].T) @ w["o"][:, 4 * i : 4 * i + 4].T
        x = x + out
        h = F.rms_norm(x, (16,), m.mlp_norm.double(), 1e-5)
        gate, up, down = (getattr(m, n).double() for n in ("w_gate", "w_up", "w_down"))
        return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T, kept

    with torch.no_grad():
        truth = [slow(x0[b][mask[b]].double(), good) for b in (0, 1)]
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            far = []
            for m in (good, bad):
                x = x0.to(dtype)
                y, weights = m.to(dtype)(x, mask), right.weights(m, x, mask)
                far.append(max((y[b][mask[b]] - truth[b][0]).abs().max().item() for b in (0, 1)))
                by_head = (weights[0] - truth[0][1]).abs().amax((1, 2)).tolist()
                assert (m(x[:, :4]) - m(x)[:, :4]).abs().max() < small
                assert (m(x[1:, 2:]) - y[1:, 2:]).abs().max() < small
                print(dtype, "weights by head", [round(g, 3) for g in by_head])
            print(dtype, "right %.1e wrong %.2f" % tuple(far))
            assert far[0] < small and far[1] > 0.1
            assert by_head[1] > 0.05 and by_head[2] > 0.05 and max(by_head[0], by_head[3]) < small
            permuted = Block(c)  # the same function class: other rows, same output
            permuted.load_state_dict(bad.state_dict())
            order = [0, 2, 1, 3]
            permuted.wq.copy_(bad.wq.view(4, 4, 16)[order].flatten(0, 1))
            permuted.wo.copy_(bad.wo.view(16, 4, 4)[:, order].flatten(1))
            assert (permuted.to(dtype)(x) - bad(x)).abs().max() < small
