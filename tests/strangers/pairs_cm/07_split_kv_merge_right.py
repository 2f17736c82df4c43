"""Flash-decoding in plain torch: keys are cut into splits, each gives an output and its log-sum-exp, and these are merged.

As in the kernels, exponentials are of base 2, with log2(e) folded into the scale.
"""
import math

import torch

from veriformer.properties import Subject

SPLIT = 16
LOG2E = 1 / math.log(2)


def one_split(q, k, v, seen):
    scores = q @ k.transpose(-1, -2)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    peak = torch.where(peak.isinf(), torch.zeros_like(peak), peak)
    p = torch.exp2(scores - peak)
    total = p.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return (p @ v) / total, (peak + torch.log2(total)).masked_fill(empty, -torch.inf)


def merge(outputs, lses):
    lses, outputs = torch.stack(lses), torch.stack(outputs)
    top = lses.detach().amax(0)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    share = torch.exp2(lses - top)
    return (share * outputs).sum(0) / share.sum(0).clamp(min=torch.finfo(share.dtype).tiny)


def attend(model, q, k, v, attention_mask=None, causal=False):
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    T, S = q.shape[-2], k.shape[-2]
    seen = None
    if causal:
        seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if attention_mask is not None:
        seen = attention_mask if seen is None else seen & attention_mask
    if seen is not None:
        seen = seen.expand(q.shape[0], q.shape[1], T, S)
    q = q * (LOG2E / math.sqrt(q.shape[-1]))
    outputs, lses = [], []
    for start in range(0, S, SPLIT):
        part = slice(start, start + SPLIT)
        out, lse = one_split(q, k[:, :, part], v[:, :, part], None if seen is None else seen[..., part])
        outputs.append(out)
        lses.append(lse)
    return merge(outputs, lses).to(dtype)


subject = Subject(
    kind="attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
)
