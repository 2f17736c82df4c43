"""Attention that takes a padding mask [B, S] of the keys."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "A padding mask [B, S] is taken for a [T, S] mask of pairs whenever the batch happens to be as large as the number of queries."
PLACE = "how the mask is broadcast to the scores"


class Attention(nn.Module):
    def spread(self, m, t, s):
        return m[:, None, None, :]

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / q.size(-1) ** 0.5
        t, s = scores.shape[-2:]
        allowed = torch.ones(1, 1, t, s, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(s - t)
        if attention_mask is not None:
            allowed = allowed & self.spread(attention_mask.bool(), t, s)
        p = torch.softmax(scores.masked_fill(~allowed, torch.finfo(scores.dtype).min), -1)
        return p.masked_fill(~allowed, 0.0) @ v


class Guessing(Attention):
    def spread(self, m, t, s):
        return m if tuple(m.shape) == (t, s) else m[:, None, None, :]


def subject(cls):
    return Subject(kind="attention", build=lambda c: cls(), mask_forms=("padding",),
                   forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
                   declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"})


right, wrong = subject(Attention), subject(Guessing)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    for b, t, clash in ((2, 4, False), (4, 4, True)):
        q, k, v = (torch.randn(b, 2, t, 4) for _ in range(3))
        pad = torch.arange(t) < torch.arange(1, b + 1)[:, None]
        want = (q @ k.mT / 2).masked_fill(~pad[:, None, None], float("-inf")).softmax(-1) @ v
        dr, dw = ((s.forward(s.build(None), q, k, v, pad) - want).abs().max().item() for s in (right, wrong))
        print(b, t, dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == clash
