"""Tiled attention with a running softmax; causal tiles that nobody sees are skipped."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "How many key tiles a causal query tile visits is computed from its first row rather than its last, so later rows lose near keys."
PLACE = "bound of the inner loop over key tiles"
BQ, BK = 4, 2


class Tiled(nn.Module):
    def end(self, i, t, s):  # first key that no row of the tile sees
        return min(i + BQ, t) + s - t

    def forward(self, q, k, v, attention_mask=None, causal=False):
        (b, h, t, d), s = q.shape, k.shape[2]
        k, v = (z.repeat_interleave(h // z.shape[1], 1) for z in (k, v))
        keep = torch.ones(b, s, dtype=torch.bool, device=q.device) if attention_mask is None else attention_mask.bool()
        tiles = []
        for i in range(0, t, BQ):
            qi = q[:, :, i:i + BQ] * d ** -0.5
            rows = torch.arange(i, i + qi.shape[2], device=q.device)[:, None] + s - t
            top = qi.new_full((*qi.shape[:3], 1), torch.finfo(q.dtype).min)
            total, acc = torch.zeros_like(top), qi.new_zeros(*qi.shape[:3], v.shape[-1])
            for j in range(0, min(s, self.end(i, t, s)) if causal else s, BK):
                cols = torch.arange(j, min(j + BK, s), device=q.device)
                ok = keep[:, None, None, j:j + BK].expand(b, 1, len(rows), len(cols))
                if causal:
                    ok = ok & (cols <= rows)
                x = (qi @ k[:, :, j:j + BK].mT).masked_fill(~ok, torch.finfo(q.dtype).min)
                new = torch.maximum(top, x.amax(-1, keepdim=True)).detach()
                p, old = (x - new).exp().masked_fill(~ok, 0.0), (top - new).exp()
                total, acc, top = total * old + p.sum(-1, keepdim=True), acc * old + p @ v[:, :, j:j + BK], new
            tiles.append(acc / torch.where(total > 0, total, torch.ones_like(total)))
        return torch.cat(tiles, 2)


class FirstRow(Tiled):
    def end(self, i, t, s):
        return i + 1 + s - t


def subject(cls):
    return Subject(kind="attention", build=lambda c: cls(), mask_forms=("padding",),
                   forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
                   declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"})


right, wrong = subject(Tiled), subject(FirstRow)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 7, 4) for _ in range(3))
    see = torch.ones(7, 7, dtype=torch.bool).tril()
    want = (q @ k.mT / 2).masked_fill(~see, float("-inf")).softmax(-1) @ v
    full = (q @ k.mT / 2).softmax(-1) @ v
    for name, sub, same in (("right", right, True), ("wrong", wrong, False)):
        m = sub.build(None)
        d = (sub.forward(m, q, k, v, causal=True) - want).abs().amax((0, 1, 3))
        print(name, d.tolist(), (sub.forward(m, q, k, v) - full).abs().max().item())
        assert torch.allclose(sub.forward(m, q, k, v), full, atol=1e-5) and (d.max() < 1e-5) == same
