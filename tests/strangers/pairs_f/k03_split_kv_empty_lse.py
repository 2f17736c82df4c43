"""Flash-decoding in two passes: every split of the keys is reduced on its own, then a second kernel combines them by their lse."""
import math

import torch
from einops import rearrange
from torch import einsum, nn
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "A split in which a row sees no key reports a log-sum-exp of 0 instead of -inf (its zero denominator is replaced by 1 before "
    "the log), so the combine pass gives the empty split the weight of a real key with score 0 and the output shrinks."
)
PLACE = "SplitKV.partial: lse taken from the guarded denominator"


class SplitKV(nn.Module):
    split = 64

    def __init__(self, empty_split_weighs=False):
        super().__init__()
        self.empty_split_weighs = empty_split_weighs

    def partial(self, q, k, v, visible):
        """q [b g r t d], k [b g n d], v [b g n e], visible broadcastable to [b g r t n]."""
        sim = einsum("b g r t d, b g n d -> b g r t n", q, k)
        sim = sim.masked_fill(~visible, -math.inf)
        top = sim.amax(-1).detach()
        top = top.masked_fill(top == -math.inf, 0.0)
        p = (sim - top[..., None]).exp()
        total = p.sum(-1)
        safe = total.masked_fill(total == 0, 1.0)
        out = einsum("b g r t n, b g n e -> b g r t e", p, v) / safe[..., None]
        lse = top + safe.log()
        if not self.empty_split_weighs:
            lse = lse.masked_fill(total == 0, -math.inf)
        return out, lse

    def combine(self, outs, lses):
        outs, lses = torch.stack(outs), torch.stack(lses)
        top = lses.amax(0).detach()
        top = top.masked_fill(top == -math.inf, 0.0)
        w = (lses - top).exp()
        total = w.sum(0)
        w = w / total.masked_fill(total == 0, 1.0)
        return einsum("s b g r t e, s b g r t -> b g r t e", outs, w)

    def forward(self, q, k, v, attention_mask=None, causal=False):
        dtype, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
        t, s = q.shape[2], k.shape[2]
        q = rearrange(q.to(work) * q.shape[-1] ** -0.5, "b (g r) t d -> b g r t d", g=k.shape[1])
        k, v = k.to(work), v.to(work)
        row = torch.arange(t, device=q.device) + s - t
        outs, lses = [], []
        for start in range(0, s, self.split):
            stop = min(start + self.split, s)
            col = torch.arange(start, stop, device=q.device)
            visible = torch.ones(1, 1, 1, t, stop - start, dtype=torch.bool, device=q.device)
            if causal:
                visible = visible & (col[None, :] <= row[:, None])
            if attention_mask is not None:
                visible = visible & rearrange(attention_mask[:, start:stop].bool(), "b n -> b 1 1 1 n")
            out, lse = self.partial(q, k[:, :, start:stop], v[:, :, start:stop], visible)
            outs.append(out)
            lses.append(lse)
        return rearrange(self.combine(outs, lses), "b g r t e -> b (g r) t e").to(dtype)


def subject(name, **flags):
    return Subject(
        kind="attention",
        name=name,
        build=lambda c: SplitKV(**flags),
        mask_forms=("padding",),
        declares={
            "attention_scale": "1/sqrt(d_head)",
            "grouped_queries": True,
            "empty_row": "zeros",
            "causal_alignment": "bottom-right",
            "padding_side": "both",
            "half_precision": True,
        },
    )


right = subject("split-kv")
wrong = subject("split-kv-empty-lse", empty_split_weighs=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(2)

    def error(sub, t, s, causal, pad=None):
        q, k, v = torch.randn(2, 6, t, 8), torch.randn(2, 2, s, 8), torch.randn(2, 2, s, 8)
        keep = torch.ones(2, s, dtype=torch.bool)
        if pad:
            keep[0, pad] = False
        ok = keep[:, None, None]
        if causal:
            ok = ok & torch.ones(t, s, dtype=torch.bool).tril(s - t)
        kk, vv = k.double().repeat_interleave(3, 1), v.double().repeat_interleave(3, 1)
        w = (q.double() @ kk.mT / 8**0.5).masked_fill(~ok, -math.inf).softmax(-1).nan_to_num(0.0)
        return (sub.build(DrawnConfig())(q, k, v, keep, causal).double() - w @ vv).abs().max().item()

    for t, s, pad in [(3, 3, None), (20, 20, slice(0, 5)), (64, 64, None), (10, 64, slice(0, 60)), (9, 5, None), (60, 40, slice(0, 40))]:
        for causal in (False, True):
            assert error(right, t, s, causal, pad) < 2e-5
            assert error(wrong, t, s, causal, pad) < 2e-5
    assert error(wrong, 100, 100, False) < 2e-5  # no split is empty
    for t, s, causal, pad in [(100, 100, True, None), (8, 200, False, slice(100, None)), (5, 130, True, slice(0, 64)), (200, 70, True, None)]:
        assert error(right, t, s, causal, pad) < 2e-5
        assert error(wrong, t, s, causal, pad) > 2e-3, (t, s)
    print("ok")
