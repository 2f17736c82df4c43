
import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    """Flash-style: tiles of queries by tiles of keys, key tiles past the diagonal are skipped. Causal: bottom right."""
    tile = 4

    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        T, S, r = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        rows = []
        for a in range(0, T, self.tile):
            qt = q[:, :, a:a + self.tile] * q.shape[-1] ** -0.5
            end = S
            if causal:
                end = min(S, max(0, a + self.tile + (0 if self.bug else S - T)))
            m = qt.new_full(qt.shape[:-1] + (1,), torch.finfo(qt.dtype).min)
            l, acc = torch.zeros_like(m), qt.new_zeros(qt.shape[:-1] + (v.shape[-1],))
            for b in range(0, end, self.tile):
                kt, vt = k[:, :, b:b + self.tile], v[:, :, b:b + self.tile]
                s = qt @ kt.transpose(-1, -2)
                ok = torch.ones_like(s, dtype=torch.bool)
                if causal:
                    i = torch.arange(a, a + qt.shape[2], device=q.device)[:, None]
                    ok = ok & (b + torch.arange(kt.shape[2], device=q.device) <= i + S - T)
                if mask is not None:
                    ok = ok & mask[:, None, None, b:b + self.tile]
                s = s.masked_fill(~ok, torch.finfo(s.dtype).min)
                new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
                p, fix = torch.exp(s - new) * ok, torch.exp(m - new)
                l, acc, m = l * fix + p.sum(-1, keepdim=True), acc * fix + p @ vt, new
            rows.append(acc / torch.where(l > 0, l, 1))
        return torch.cat(rows, 2)


WHAT = 'In a causal call with more keys than queries, the bound beyond which key tiles are skipped forgets the offset S - T, so late queries miss visible keys.'
PLACE = 'tiled attention kernel, causal tile skipping'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
        declares={'causal_alignment': 'bottom-right', 'empty_row': 'zeros', 'grouped_queries': True},
    )


right, wrong = make(False), make(True)
