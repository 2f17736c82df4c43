"""Grouped-query attention by einsum: the query heads are folded to (groups, heads a group), keys and values are never
repeated. Queries are worked through in chunks of 4. Unusual: masked scores are -1e9, so a row without keys is a plain mean."""
import torch
from torch import nn
from veriformer.properties import Subject


class Grouped(nn.Module):
    def forward(s, q, k, v, mask=None, causal=False):
        B, H, T, K = q.shape
        G, S = k.shape[1], k.shape[2]
        q = q.reshape(B, G, H // G, T, K) / K**0.5
        outs = []
        for a in range(0, T, 4):
            b = min(a + 4, T)
            w = torch.einsum("bgrtk,bgsk->bgrts", q[:, :, :, a:b], k)
            if causal:
                t = torch.arange(a, b, device=q.device)[:, None] + (S - T)
                w = w.masked_fill(torch.arange(S, device=q.device) > t, -1e9)
            if mask is not None:
                m = mask[:, None, None, a:b] if mask.dim() == 3 else mask[a:b]
                w = w.masked_fill(~m, -1e9)
            outs.append(torch.einsum("bgrts,bgse->bgrte", w.softmax(-1), v))
        return torch.cat(outs, 3).flatten(1, 2)


args = dict(kind="attention", build=lambda c: Grouped(), mask_forms=("pairwise",),
            forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal))
undeclared = Subject(**args)
declared = Subject(**args, declares={"grouped_queries": True, "empty_row": "mean", "causal_alignment": "bottom-right"})
