"""Attention with softmax-plus-one: exp(s_i) / (1 + sum exp(s_j))."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "After the maximum m is subtracted, 1 is added to the denominator where exp(-m) belongs, so a head can never fall silent."
PLACE = "denominator of the quiet softmax"


def quiet(s):
    m = s.amax(-1, keepdim=True).clamp(min=0).detach()
    e = (s - m).exp()
    return e / (e.sum(-1, keepdim=True) + (-m).exp())


def loud(s):
    m = s.amax(-1, keepdim=True).detach()
    e = (s - m).exp()
    return e / (e.sum(-1, keepdim=True) + 1)


class Attention(nn.Module):
    def __init__(self, soft):
        super().__init__()
        self.soft = soft

    def weights(self, q, k, attention_mask=None, causal=False):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        s = q @ k.mT * q.shape[-1] ** -0.5
        ok = torch.ones_like(s, dtype=torch.bool)
        if attention_mask is not None:
            ok = ok & attention_mask.bool()[:, None, None]
        if causal:
            ok = ok.tril(s.shape[-1] - s.shape[-2])
        return self.soft(s.masked_fill(~ok, torch.finfo(s.dtype).min)).masked_fill(~ok, 0.0)

    def forward(self, q, k, v, attention_mask=None, causal=False):
        return self.weights(q, k, attention_mask, causal) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def subject(soft):
    return Subject(kind="attention", build=lambda c: Attention(soft), mask_forms=("padding",),
                   forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
                   weights=lambda m, q, k, v, attention_mask=None, causal=False: m.weights(q, k, attention_mask, causal),
                   declares={"sink": True, "grouped_queries": True, "empty_row": "zeros",
                             "causal_alignment": "bottom-right"})


right, wrong = subject(quiet), subject(loud)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    q, k, v = (2 * torch.randn(2, 2, 5, 4) for _ in range(3))
    e = (q @ k.mT / 2).exp()
    want = e / (1 + e.sum(-1, keepdim=True)) @ v
    for name, sub, same in (("right", right, True), ("wrong", wrong, False)):
        d = (sub.forward(sub.build(None), q, k, v) - want).abs().max().item()
        print(name, d)
        assert (d < 1e-5) == same
