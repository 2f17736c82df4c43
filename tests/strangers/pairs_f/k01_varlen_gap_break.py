"""Python prototype of our variable-length flash kernel: one "program" per (sample, query tile), as the CUDA grid has it.

The prototype is kept line by line parallel to the kernel, hence the loops. A key tile none of whose keys is kept is never loaded.
"""
import math

import torch
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The kernel leaves the loop over key tiles at the first tile that is all padding, as if padding could only stand at the end: "
    "with 32 or more padded keys on the left, or a hole in the middle, all real keys behind them are lost."
)
PLACE = "_program: `if not kept.any(): break` (should go on with the next tile)"

BLOCK_M, BLOCK_N = 32, 32


def _program(q, k, v, keep, causal, offset, row0, gap_ends_loop):
    """One query tile of one sample: q [H,M,K], k [H,S,K], v [H,S,E], keep [S] -> [H,M,E]."""
    heads, m_rows, width = q.shape
    n_keys = k.shape[1]
    sm_scale = 1.0 / math.sqrt(width)
    rows = torch.arange(row0, row0 + m_rows, device=q.device) + offset
    m_i = q.new_full((heads, m_rows), -math.inf)
    l_i = q.new_zeros((heads, m_rows))
    acc = q.new_zeros((heads, m_rows, v.shape[-1]))
    acc = acc + sum(x[..., :0].sum() for x in (q, k, v))  # nothing is added; keeps the graph where no tile is visited
    for n0 in range(0, n_keys, BLOCK_N):
        n1 = min(n0 + BLOCK_N, n_keys)
        if causal and n0 > row0 + m_rows - 1 + offset:
            break  # above the diagonal from here on
        kept = keep[n0:n1]
        if not kept.any():
            if gap_ends_loop:
                break
            continue
        cols = torch.arange(n0, n1, device=q.device)
        s = q @ k[:, n0:n1].transpose(-1, -2) * sm_scale
        visible = kept[None, :].expand(m_rows, -1)
        if causal:
            visible = visible & (cols[None, :] <= rows[:, None])
        s = s.masked_fill(~visible, -math.inf)
        m_new = torch.maximum(m_i, s.amax(-1)).detach()
        m_use = torch.where(m_new == -math.inf, torch.zeros_like(m_new), m_new)
        p = torch.exp(s - m_use[..., None])
        alpha = torch.exp(m_i - m_use)
        l_i = l_i * alpha + p.sum(-1)
        acc = acc * alpha[..., None] + p @ v[:, n0:n1]
        m_i = m_new
    return acc / torch.where(l_i == 0, torch.ones_like(l_i), l_i)[..., None]


def varlen_flash(q, k, v, attention_mask=None, causal=False, gap_ends_loop=False):
    dtype = q.dtype
    work = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(work), k.to(work), v.to(work)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    batch, _, t_len, _ = q.shape
    s_len = k.shape[2]
    keep = torch.ones(batch, s_len, dtype=torch.bool, device=q.device) if attention_mask is None else attention_mask.bool()
    samples = []
    for b in range(batch):
        tiles = [
            _program(q[b, :, i0 : i0 + BLOCK_M], k[b], v[b], keep[b], causal, s_len - t_len, i0, gap_ends_loop)
            for i0 in range(0, t_len, BLOCK_M)
        ]
        samples.append(torch.cat(tiles, 1))
    return torch.stack(samples).to(dtype)


def _subject(name, gap_ends_loop):
    return Subject(
        kind="attention",
        name=name,
        forward=lambda model, q, k, v, attention_mask=None, causal=False: varlen_flash(
            q, k, v, attention_mask, causal, gap_ends_loop
        ),
        mask_forms=("padding",),
        declares={
            "attention_scale": "1/sqrt(d_head)",
            "grouped_queries": True,
            "empty_row": "zeros",
            "causal_alignment": "bottom-right",
            "padding_side": "both",
            "half_precision": True,
            "memory": "linear",
        },
    )


right = _subject("varlen-flash", False)
wrong = _subject("varlen-flash-break", True)


def _reference(q, k, v, keep, causal):
    q, k, v = q.double(), k.double(), v.double()
    r = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
    t, s = q.shape[2], k.shape[2]
    ok = torch.ones(q.shape[0], 1, t, s, dtype=torch.bool)
    if causal:
        ok = ok & torch.ones(t, s, dtype=torch.bool).tril(s - t)
    if keep is not None:
        ok = ok & keep[:, None, None, :]
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~ok, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def err(subject, t, s, pad, causal, h=4, g=2):
        q, k, v = torch.randn(2, h, t, 16), torch.randn(2, g, s, 16), torch.randn(2, g, s, 8)
        keep = torch.ones(2, s, dtype=torch.bool)
        if pad:
            keep[1, pad] = False
        return (subject.forward(None, q, k, v, keep, causal).double() - _reference(q, k, v, keep, causal)).abs().max().item()

    for t, s, pad in [(5, 5, slice(0, 2)), (31, 31, slice(0, 9)), (90, 90, slice(0, 20)), (70, 130, slice(60, None)), (9, 40, None)]:
        for causal in (False, True):
            assert err(right, t, s, pad, causal) < 2e-5
            assert err(wrong, t, s, pad, causal) < 2e-5, (t, s, pad)
    for t, s, pad in [(90, 90, slice(0, 40)), (1, 128, slice(30, 70)), (130, 130, slice(0, 64))]:
        for causal in (False, True):
            assert err(right, t, s, pad, causal) < 2e-5
            assert err(wrong, t, s, pad, causal) > 0.05, (t, s, pad)
    print("ok")
