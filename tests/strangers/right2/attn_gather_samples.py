"""A loop over samples that throws padded keys away before the softmax. Unusual: no masked score exists; right, the softmax
runs over exactly the keys that are there. Queries without any key get zeros."""
import torch
from torch import nn
from veriformer.properties import Subject


class Ragged(nn.Module):
    def forward(s, q, k, v, mask=None, causal=False):
        T, S = q.shape[2], k.shape[2]
        outs = []
        for b in range(q.shape[0]):
            idx = torch.arange(S, device=q.device) if mask is None else mask[b].nonzero()[:, 0]
            kb, vb = k[b, :, idx], v[b, :, idx]
            w = torch.einsum("htk,hsk->hts", q[b], kb) * q.shape[-1] ** -0.5
            if causal:
                see = idx <= torch.arange(T, device=q.device)[:, None] + (S - T)
                e = w.masked_fill(~see, torch.finfo(w.dtype).min)
                p = e.softmax(-1) * see.to(w.dtype) if len(idx) else w
            else:
                p = w.softmax(-1)
            outs.append(torch.einsum("hts,hse->hte", p, vb))
        return torch.stack(outs)


args = dict(kind="attention", build=lambda c: Ragged(), mask_forms=("padding",),
            forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal))
undeclared = Subject(**args)
declared = Subject(**args, declares={"empty_row": "zeros", "causal_alignment": "bottom-right"})
