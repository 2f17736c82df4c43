"""DeepSeek-V2's block: keys and values are rebuilt from a normed latent of half the width, queries from a latent of their
own, and 4 rotated channels, one key for all heads, stand beside the 4 that are not; scores are scaled by the root of the 8
channels together, so by 1/sqrt(8) and not by 1/sqrt(d_head). It hands out its weights, and has two forms: keys rebuilt, or
(as the paper has it for decoding) absorbed into the queries.

Why it is right: the absorbed form, (W_uk^T q) . c, is the same product. Below: against loops, causal, shift invariant, padding
on both sides, and both forms equal."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

ROPE, SCALE = 4, 8**-0.5


def rotate(x, start=0):
    """x [B, T, *, ROPE], neighbouring channels are a pair."""
    rate = 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64, device=x.device) / ROPE)
    angle = torch.arange(start, start + x.shape[1], dtype=torch.float64, device=x.device)[:, None, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class MLABlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.h, self.k = c.d_model, c.num_heads, c.d_model // c.num_heads
        self.latent = d // 2
        self.input_norm, self.mlp_norm = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.q_norm, self.kv_norm = nn.RMSNorm(self.latent, eps=1e-6), nn.RMSNorm(self.latent, eps=1e-6)
        self.q_down = nn.Linear(d, self.latent, bias=False)
        self.q_up = nn.Linear(self.latent, self.h * (self.k + ROPE), bias=False)
        self.kv_down = nn.Linear(d, self.latent + ROPE, bias=False)
        self.kv_up = nn.Linear(self.latent, self.h * 2 * self.k, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.gate_up, self.down = nn.Linear(d, 2 * c.d_ff, bias=False), nn.Linear(c.d_ff, d, bias=False)

    def queries(self, x):
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.h, -1))
        return q[..., : self.k], rotate(q[..., self.k :])

    def latents(self, x):
        latent, shared = self.kv_down(x).split((self.latent, ROPE), -1)
        return self.kv_norm(latent), rotate(shared[:, :, None])[:, :, 0]

    def attend(self, x, mask, absorbed=False):
        q, q_rope = self.queries(x)
        latent, k_rope = self.latents(x)
        up = self.kv_up.weight.unflatten(0, (self.h, 2 * self.k))
        if absorbed:
            scores = torch.einsum("bthk,hkc,bsc->bhts", q, up[:, : self.k], latent)
        else:
            k, v = self.kv_up(latent).unflatten(-1, (self.h, -1)).chunk(2, -1)
            scores = torch.einsum("bthk,bshk->bhts", q, k)
        scores = (scores + torch.einsum("bthr,bsr->bhts", q_rope, k_rope)) * SCALE
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            seen = seen & mask.bool()[:, None, None]
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        if absorbed:
            y = torch.einsum("bhts,bsc,hkc->bthk", weights, latent, up[:, self.k :])
        else:
            y = torch.einsum("bhts,bshk->bthk", weights, v)
        return weights, self.out(y.flatten(2))

    def forward(self, x, mask=None, absorbed=False):
        x = x + self.attend(self.input_norm(x), mask, absorbed)[1]
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def make(**declares):
    return Subject(
        kind="layer", name="latent attention", build=MLABlock, declares=declares,
        forward=lambda layer, x, attention_mask=None: layer(x, attention_mask),
        weights=lambda layer, x, attention_mask=None: layer.attend(layer.input_norm(x), attention_mask)[0],
        domain={"d_model": [16], "num_heads": [4]},
    )  # fmt: skip


declared = make(
    causal=True, attention_scale=SCALE, positions="rotary", rotary_dim=ROPE, layout="interleaved", base=10000, norm="rms",
    norm_placement="pre", residual=True, activation="swiglu", bias=False, padding_side="both", structure="other",
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    layer = MLABlock(DrawnConfig(d_model=16, num_heads=4))
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(float(p.dim() == 1), 0.5)
    w = {k: v.double() for k, v in layer.state_dict().items()}
    x0 = torch.randn(2, 8, 16)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 6:], mask[1, :3] = False, False

    def slow(x):
        def norm(y, n):
            return y / (y @ y / len(y) + 1e-6).sqrt() * w[n + ".weight"]

        def turn(y, t):
            z = torch.view_as_complex(y.reshape(2, 2).contiguous())
            return torch.view_as_real(z * torch.exp(1j * t * torch.tensor([1, 0.01], dtype=torch.float64))).flatten()

        out = []
        down = [w["kv_down.weight"] @ norm(y, "input_norm") for y in x]
        for t, y in enumerate(x):
            q = (w["q_up.weight"] @ norm(w["q_down.weight"] @ norm(y, "input_norm"), "q_norm")).view(4, 8)
            heads = []
            for h in range(4):
                query, scores, values = torch.cat((q[h, :4], turn(q[h, 4:], t))), [], []
                for s in range(t + 1):
                    kv = (w["kv_up.weight"] @ norm(down[s][:8], "kv_norm")).view(4, 8)[h]
                    scores.append(query @ torch.cat((kv[:4], turn(down[s][8:], s))) / 8**0.5)
                    values.append(kv[4:])
                heads.append(sum(a * b for a, b in zip(torch.stack(scores).softmax(0), values)))
            y = y + w["out.weight"] @ torch.cat(heads)
            gate, up = (w["gate_up.weight"] @ norm(y, "mlp_norm")).chunk(2)
            out.append(y + w["down.weight"] @ (gate * gate.sigmoid() * up))
        return torch.stack(out)

    truth = [slow(x0[b][mask[b]].double()) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        x, m = x0.to(dtype), layer.to(dtype)
        y = m(x, mask)
        far = max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1))
        causal = (m(x[:, :4]) - m(x)[:, :4]).abs().max().item()
        absorbed = (m(x, mask, absorbed=True) - y).abs().max().item()
        rows = (declared.weights(m, x).sum(-1) - 1).abs().max().item()
        print(dtype, f"definition {far:.1e} causality {causal:.1e} absorbed {absorbed:.1e} rows {rows:.1e}")
        assert max(far, causal, absorbed, rows) < small
