"""Sliding-window attention in tiles, each tile of queries visiting only the tiles of keys that its window reaches
(Mistral-like; in-house kernel prototype). Always causal, with a window of 40; grouped heads; keys may be more than
queries."""

import torch

from veriformer.properties import Subject

WHAT = (
    "The first tile of keys that is visited is found from the window of the last query of a tile, not of the first: the "
    "earlier queries of the tile lose the keys of the tiles before. With tiles of 32 and a window of 40 that begins with "
    "72 positions, where the queries from 64 on miss up to seven of their 40 keys."
)
PLACE = "lowest_wrong: rows[-1] for rows[0]"
TILE, WINDOW = 32, 40


def lowest_right(rows):
    return max(0, int(rows[0]) - WINDOW + 1)


def lowest_wrong(rows):
    return max(0, int(rows[-1]) - WINDOW + 1)


def tile_loop(q, k, v, keep, lowest):
    """One tile of queries at a time; q `[B, G, R, T, K]`, k and v `[B, G, 1, S, *]`, keep `[B, 1, 1, 1, S]` or None."""
    t, s = q.shape[-2], k.shape[-2]
    wide = torch.promote_types(q.dtype, torch.float32)
    low = torch.finfo(wide).min / 4
    done = []
    for q_tile in (q * q.shape[-1] ** -0.5).to(wide).split(TILE, -2):
        start = sum(x.shape[-2] for x in done)
        rows = torch.arange(start, start + q_tile.shape[-2], device=q.device) + (s - t)
        best = torch.full((*q_tile.shape[:-1], 1), low, dtype=wide, device=q.device)
        norm = torch.zeros_like(best)
        acc = torch.zeros((*q_tile.shape[:-1], v.shape[-1]), dtype=wide, device=q.device)
        for k0 in range(lowest(rows) // TILE * TILE, min(s, int(rows[-1]) + 1), TILE):
            cols = torch.arange(k0, min(k0 + TILE, s), device=q.device)
            see = (cols <= rows[:, None]) & (cols > rows[:, None] - WINDOW)
            if keep is not None:
                see = see & keep[..., cols]
            x = (q_tile @ k[..., cols, :].to(wide).mT).masked_fill(~see, low)
            new = torch.maximum(best, x.detach().amax(-1, keepdim=True))
            p, shrink = (x - new).exp() * see, (best - new).exp()
            norm, acc, best = norm * shrink + p.sum(-1, keepdim=True), acc * shrink + p @ v[..., cols, :].to(wide), new
        done.append(acc / torch.where(norm == 0, torch.ones_like(norm), norm))
    return torch.cat(done, -2).to(q.dtype)


def make(lowest):
    def attend(model, q, k, v, attention_mask=None, causal=True):  # always causal, whatever is asked
        groups = k.shape[1]
        keep = None if attention_mask is None else attention_mask.bool()[:, None, None, None]
        out = tile_loop(q.unflatten(1, (groups, -1)), k.unsqueeze(2), v.unsqueeze(2), keep, lowest)
        return out.flatten(1, 2)

    return Subject(
        kind="attention",
        name="window in tiles",
        forward=attend,
        mask_forms=("padding",),
        declares={
            "causal": True, "window": WINDOW, "grouped_queries": True, "causal_alignment": "bottom-right",
            "empty_row": "zeros",
        },
    )  # fmt: skip


right, wrong = make(lowest_right), make(lowest_wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for t, s, h, g in ((5, 5, 2, 2), (64, 64, 4, 2), (71, 71, 2, 1), (72, 72, 2, 1), (130, 130, 4, 2), (1, 90, 2, 2), (64, 100, 2, 2), (30, 20, 2, 2)):
            q, k, v = torch.randn(2, h, t, 8), torch.randn(2, g, s, 8), torch.randn(2, g, s, 8)
            q, k, v = (x.to(dtype) for x in (q, k, v))
            mask = torch.arange(s)[None] < torch.tensor([s, s - 4])[:, None]
            qd, kd, vd = q.double(), *(x.double().repeat_interleave(h // g, 1) for x in (k, v))
            i, j = torch.arange(t)[:, None] + s - t, torch.arange(s)[None]
            see = ((j <= i) & (j > i - WINDOW))[None, None] & mask[:, None, None]
            truth = ((qd @ kd.mT / 8**0.5).masked_fill(~see, -1e300).softmax(-1) * see) @ vd
            a, b = ((f.forward(None, q, k, v, mask) - truth).abs() for f in (right, wrong))
            off = (b.amax((0, 1, 3)) > small).nonzero().flatten().tolist()
            print(dtype, (t, s), f"right {a.max():.1e} wrong {b.max():.1e} rows", off)
            assert a.max() < small
            assert (b.max() > 0.05 and 0 < len(off) < t) if t >= 72 or (t, s) == (64, 100) else b.max() < small
            if dtype == torch.float64:
                q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
                short = [x[:, :, :6] for x in (q, k, v)]
                if t == 5:
                    assert torch.autograd.gradcheck(lambda *x: right.forward(None, *x), short)
