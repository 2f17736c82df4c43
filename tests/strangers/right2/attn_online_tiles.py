"""Flash attention in plain torch: tiles of 3 keys, a running maximum and a running sum. Unusual: the maximum is detached;
right, the result does not depend on it, so its gradient is zero. Rows without keys give zeros; causal is bottom-right."""
import torch
from torch import nn
from veriformer.properties import Subject


class Flash(nn.Module):
    def forward(s, q, k, v, mask=None, causal=False, tile=3):
        T, S, inf = q.shape[2], k.shape[2], float("-inf")
        top = q.new_full((*q.shape[:3], 1), inf)
        den, out = torch.zeros_like(top), q.new_zeros(*q.shape[:3], v.shape[-1])
        rows = torch.arange(T, device=q.device)[:, None] + S - T
        for a in range(0, S, tile):
            b = min(a + tile, S)
            sc = q @ k[:, :, a:b].mT * q.shape[-1] ** -0.5
            if causal:
                sc = sc.masked_fill(torch.arange(a, b, device=q.device) > rows, inf)
            if mask is not None:
                m = mask[..., a:b]
                sc = sc.masked_fill(~(m[:, None] if m.dim() == 3 else m), inf)
            new = torch.maximum(top, sc.detach().amax(-1, keepdim=True))
            safe = torch.where(new == inf, torch.zeros_like(new), new)
            p, fade = (sc - safe).exp(), (top - safe).exp()
            den, out, top = den * fade + p.sum(-1, keepdim=True), out * fade + p @ v[:, :, a:b], new
        return out / torch.where(den == 0, torch.ones_like(den), den)


args = dict(kind="attention", build=lambda c: Flash(), mask_forms=("pairwise",),
            forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal))
undeclared = Subject(**args)
declared = Subject(**args, declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "memory": "linear"})
