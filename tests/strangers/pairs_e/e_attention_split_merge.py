"""Keys are split in two parts (as for long contexts), each is attended to, the results are merged."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The partial results of the two key splits are merged with weights from their score maxima rather than from their log-sum-exp."
PLACE = "weight that each split returns for the merge"


def lse(s):
    return s.logsumexp(-1, keepdim=True)


def peak(s):
    return s.amax(-1, keepdim=True)


class SplitKV(nn.Module):
    def __init__(self, stat):
        super().__init__()
        self.stat = stat

    def forward(self, q, k, v, attention_mask=None, causal=False):
        t, s = q.shape[2], k.shape[2]
        rep, size = q.shape[1] // k.shape[1], max(1, (s + 1) // 2)
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        ok = torch.ones(t, s, dtype=torch.bool, device=q.device)
        if causal:
            ok = ok.tril(s - t)
        ok = ok[None, None]
        if attention_mask is not None:
            m = attention_mask.bool()
            ok = ok & (m[:, None] if m.dim() == 3 else m[None, None])
        outs, stats = [], []
        for kp, vp, okp in zip(k.split(size, 2), v.split(size, 2), ok.split(size, -1)):
            x = (q @ kp.mT * q.shape[-1] ** -0.5).masked_fill(~okp, torch.finfo(q.dtype).min)
            outs.append(x.softmax(-1) @ vp)
            stats.append(self.stat(x))
        share = torch.stack(stats).softmax(0)
        out = (share * torch.stack(outs)).sum(0)
        return out.masked_fill(~ok.any(-1, keepdim=True), 0.0)


def subject(stat):
    return Subject(kind="attention", build=lambda c: SplitKV(stat), mask_forms=("pairwise",),
                   forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
                   declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"})


right, wrong = subject(lse), subject(peak)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    ok = torch.rand(2, 5, 5) < 0.6
    ok[..., 0] = True
    want = (q @ k.mT / 2).masked_fill(~ok[:, None], float("-inf")).softmax(-1) @ v
    for name, sub, same in (("right", right, True), ("wrong", wrong, False)):
        d = (sub.forward(sub.build(None), q, k, v, ok) - want).abs().max().item()
        print(name, d)
        assert (d < 1e-5) == same
