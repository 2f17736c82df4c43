# Prototype of the TPU kernel (Pallas port), numerics only. Lanes come in 64s: a head that does not fit into one lane group is
# padded with zeros to a multiple of 64 and the output is sliced back. Heads up to 64 use one masked lane group, no padding.
import math

import torch
import torch.nn.functional as F
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Heads wider than 64 are padded to a multiple of 64 before the softmax scale is read off the last dimension, so at widths such "
    "as 72, 80 or 96 the scores are multiplied by 1/sqrt(128): the softmax is too flat."
)
PLACE = "mha: sm_scale is computed after _pad_lanes"

LANES = 64
BQ, BK = 64, 128


def _pad_lanes(x):
    width = x.shape[-1]
    if width <= LANES:
        return x
    return F.pad(x, (0, -width % LANES))


def _mha_kernel(q_tile, k, v, keep, q_pos, causal, sm_scale):
    m = torch.full(q_tile.shape[:-1] + (1,), -math.inf, dtype=q_tile.dtype, device=q_tile.device)
    l = torch.zeros_like(m)
    o = torch.zeros(q_tile.shape[:-1] + v.shape[-1:], dtype=q_tile.dtype, device=q_tile.device)
    for start in range(0, k.shape[-2], BK):
        k_tile, v_tile = k[..., start : start + BK, :], v[..., start : start + BK, :]
        s = torch.matmul(q_tile, k_tile.transpose(-1, -2)) * sm_scale
        k_pos = start + torch.arange(k_tile.shape[-2], device=k.device)
        see = torch.ones(len(q_pos), len(k_pos), dtype=torch.bool, device=k.device)
        if causal:
            see = k_pos[None, :] <= q_pos[:, None]
        if keep is not None:
            see = see & keep[:, None, None, start : start + BK]
        s = torch.where(see, s, torch.full_like(s, -math.inf))
        m_next = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        m_finite = torch.where(m_next > -math.inf, m_next, torch.zeros_like(m_next))
        p = torch.exp(s - m_finite)
        correction = torch.exp(m - m_finite)
        l = l * correction + p.sum(-1, keepdim=True)
        o = o * correction + torch.matmul(p, v_tile)
        m = m_next
    return o / torch.where(l > 0, l, torch.ones_like(l))


def mha(q, k, v, attention_mask=None, causal=False, scale_of_padded=False):
    in_dtype, head_out = q.dtype, v.shape[-1]
    sm_scale = q.shape[-1] ** -0.5
    acc_dtype = torch.promote_types(in_dtype, torch.float32)
    q, k, v = (_pad_lanes(x.to(acc_dtype)) for x in (q, k, v))
    if scale_of_padded:
        sm_scale = q.shape[-1] ** -0.5
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    keep = None if attention_mask is None else attention_mask.bool()
    tiles = []
    for start in range(0, q.shape[2], BQ):
        q_tile = q[:, :, start : start + BQ]
        q_pos = start + torch.arange(q_tile.shape[2], device=q.device)
        tiles.append(_mha_kernel(q_tile, k, v, keep, q_pos, causal, sm_scale))
    return torch.cat(tiles, dim=2)[..., :head_out].to(in_dtype)


_facts = dict(
    attention_scale="1/sqrt(d_head)",
    grouped_queries=True,
    empty_row="zeros",
    causal_alignment="top-left",
    padding_side="both",
    half_precision=True,
    memory="linear",
)
right = Subject(
    kind="attention",
    name="lane-padded",
    forward=lambda _, q, k, v, attention_mask=None, causal=False: mha(q, k, v, attention_mask, causal),
    mask_forms=("padding",),
    declares=_facts,
)
wrong = Subject(
    kind="attention",
    name="lane-padded-scale",
    forward=lambda _, q, k, v, attention_mask=None, causal=False: mha(q, k, v, attention_mask, causal, True),
    mask_forms=("padding",),
    declares=_facts,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(7)

    def error(sub, t, s, width, causal, padded=False, out_width=None):
        q, k, v = torch.randn(2, 2, t, width), torch.randn(2, 1, s, width), torch.randn(2, 1, s, out_width or width)
        keep = torch.ones(2, s, dtype=torch.bool)
        if padded:
            keep[1, : s // 3] = False
        ok = keep[:, None, None]
        ok = ok & torch.ones(t, s, dtype=torch.bool).tril() if causal else ok
        w = (q.double() @ k.double().mT / width**0.5).masked_fill(~ok, -math.inf).softmax(-1).nan_to_num(0.0)
        got = sub.forward(None, q, k, v, keep if padded else None, causal)
        return (got.double() - w @ v.double()).abs().max().item()

    for causal in (False, True):
        for padded in (False, True):
            for t, s in [(6, 6), (5, 9), (100, 150), (9, 4)]:
                for width in (4, 16, 33, 64, 128):
                    assert error(right, t, s, width, causal, padded) < 2e-5
                    assert error(wrong, t, s, width, causal, padded) < 2e-5
                assert error(wrong, t, s, 32, causal, padded, out_width=80) < 2e-5
                for width in (72, 80, 96, 160):
                    assert error(right, t, s, width, causal, padded) < 2e-5
                    assert error(right, t, s, width, causal, padded, out_width=24) < 2e-5
                    assert error(wrong, t, s, width, causal, padded) > 0.05, (t, s, width)
    print("ok")
