"""Attention whose values may be wider than its keys."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The scale is one over the root of the values' width, although the dot products run over the keys' width."
PLACE = "scale of the scores"


class Attention(nn.Module):
    def scale(self, k, v):
        return k.shape[-1] ** -0.5

    def forward(self, q, k, v, attention_mask=None, causal=False):
        b, h, t, _ = q.shape
        g, s = k.shape[1], k.shape[2]
        q = q.reshape(b, g, h // g, t, -1) * self.scale(k, v)
        scores = torch.einsum("bgrtk,bgsk->bgrts", q, k)
        ok = torch.ones(b, t, s, dtype=torch.bool, device=q.device)
        if attention_mask is not None:
            ok = ok & attention_mask.bool()  # [T, S] or [B, T, S]
        if causal:
            ok = ok.tril(s - t)
        ok = ok[:, None, None]
        w = scores.masked_fill(~ok, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        return torch.einsum("bgrts,bgse->bgrte", w, v).reshape(b, h, t, -1)


class FromValues(Attention):
    def scale(self, k, v):
        return v.shape[-1] ** -0.5


def subject(cls):
    return Subject(kind="attention", build=lambda c: cls(), mask_forms=("pairwise",),
                   forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
                   declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"})


right, wrong = subject(Attention), subject(FromValues)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    for width, clash in ((8, False), (3, True)):
        v = torch.randn(2, 2, 5, width)
        want = (q @ k.repeat_interleave(2, 1).mT / 8 ** 0.5).softmax(-1) @ v.repeat_interleave(2, 1)
        dr, dw = ((s.forward(s.build(None), q, k, v) - want).abs().max().item() for s in (right, wrong))
        print(width, dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == clash
