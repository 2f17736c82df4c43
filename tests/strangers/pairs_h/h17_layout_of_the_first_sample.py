"""Block-sparse attention in the style of DeepSpeed and Triton's blocksparse: a layout says which tiles of 32 by 32 hold
anything at all, only these are computed. What fits into one tile is computed densely."""

import torch

from veriformer.properties import Subject

WHAT = (
    "The layout of tiles is taken from the mask of the first sample of the batch and used for all: where that sample has "
    "a whole tile of padding, the other samples' keys in the tile are dropped as well. It needs more than 32 keys, two "
    "samples, and a first one that is shorter by a tile."
)
PLACE = "layout_wrong: allowed[0]"
TILE = 32


def layout_right(allowed):
    return tiles(allowed.any(0))


def layout_wrong(allowed):
    return tiles(allowed[0])


def tiles(allowed):
    """`[1, T, S]` to `[T / 32, S / 32]`: does a tile hold anything."""
    return torch.nn.functional.max_pool2d(allowed.float(), TILE, ceil_mode=True)[0].bool()


def dense(q, k, v, allowed):
    x = (q @ k.mT).masked_fill(~allowed, torch.finfo(q.dtype).min / 4)
    return (x.softmax(-1) * allowed) @ v


class BlockSparse:
    def __init__(self, layout):
        self.layout = layout

    def __call__(self, q, k, v, allowed):
        if max(q.shape[-2], k.shape[-2]) <= TILE:
            return dense(q, k, v, allowed)
        table = self.layout(allowed)
        stripes = []
        for i, qi in enumerate(q.split(TILE, -2)):
            hit = table[i].nonzero().flatten().tolist()
            if not hit:
                stripes.append(q.new_zeros(*qi.shape[:-1], v.shape[-1]))
                continue
            cols = torch.cat([torch.arange(j * TILE, min((j + 1) * TILE, k.shape[-2]), device=q.device) for j in hit])
            rows = slice(i * TILE, i * TILE + qi.shape[-2])
            stripes.append(dense(qi, k[..., cols, :], v[..., cols, :], allowed[..., rows, :][..., cols]))
        return torch.cat(stripes, -2)


def make(layout):
    kernel = BlockSparse(layout)

    def attend(model, q, k, v, attention_mask=None, causal=False):
        b, t, s = q.shape[0], q.shape[2], k.shape[2]
        allowed = torch.ones(b, 1, t, s, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(s - t)
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None]
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        return kernel(q.to(wide) * q.shape[-1] ** -0.5, k.to(wide), v.to(wide), allowed).to(q.dtype)

    return Subject(
        kind="attention",
        name="block-sparse attention",
        forward=attend,
        mask_forms=("padding",),
        declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
    )


right, wrong = make(layout_right), make(layout_wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for t, s, lengths, causal, seen in (
            (7, 7, [2, 7], False, False), (32, 32, [0, 32], True, False), (40, 40, [40, 5], False, False),
            (40, 40, [33, 40], True, False), (40, 40, [32, 40], False, True), (100, 100, [3, 99, 60], True, True),
            (10, 70, [30, 70], True, True), (9, 4, [4, 2], True, False), (90, 40, [40, 3], True, False),
        ):  # fmt: skip
            b = len(lengths)
            q, k, v = (torch.randn(b, h, n, 8).to(dtype) for h, n in ((4, t), (2, s), (2, s)))
            mask = torch.arange(s)[None] < torch.tensor(lengths)[:, None]
            see = mask[:, None, None] & (torch.ones(t, s).tril(s - t).bool() if causal else torch.tensor(True))
            kd, vd = (x.double().repeat_interleave(2, 1) for x in (k, v))
            truth = ((q.double() @ kd.mT / 8**0.5).masked_fill(~see, -1e300).softmax(-1) * see) @ vd
            e = [(f.forward(None, q, k, v, mask, causal) - truth).abs().amax((1, 2, 3)) for f in (right, wrong)]
            print(dtype, (t, s), lengths, "right", f"{e[0].max():.1e}", "wrong, by sample", [f"{x:.1e}" for x in e[1]])
            assert e[0].max() < small and e[1][0] < small and (e[1].max() > 0.1 if seen else e[1].max() < small)
