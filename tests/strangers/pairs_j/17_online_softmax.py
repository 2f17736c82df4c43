"""Attention block by block with a running maximum."""

import math

import torch

from veriformer.properties import Subject

WHAT = "when a later block raises the running maximum the running sum is not scaled down, only the accumulated values are"
CAUSE = (
    "In the online softmax the running denominator is not rescaled by exp(old maximum - new maximum) when a later "
    "block of keys has a larger score, so that the weights no longer sum to one beyond the first block of 16 keys."
)
BLOCK = 16


def attend(q, k, v, attention_mask, causal, keep):
    T, S, given = q.shape[-2], k.shape[-2], q.dtype
    if given in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(S - T)
    if attention_mask is not None:
        seen = seen & attention_mask
    seen = seen if seen.ndim == 2 else seen[:, None]
    top = q.new_full((*q.shape[:-1], 1), -math.inf)
    total = q.new_zeros((*q.shape[:-1], 1))
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for start in range(0, S, BLOCK):
        stop = min(start + BLOCK, S)
        scores = q @ k[..., start:stop, :].transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~seen[..., start:stop], -math.inf)
        new = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        safe = torch.where(new.isinf(), torch.zeros_like(new), new)
        p = torch.exp(scores - safe)
        fade = torch.exp(top - safe)
        total = keep(total, fade) + p.sum(-1, keepdim=True)
        out = out * fade + p @ v[..., start:stop, :]
        top = new
    return (out / torch.where(total == 0, torch.ones_like(total), total)).to(given)


def tiled(model, q, k, v, attention_mask=None, causal=False):
    return attend(q, k, v, attention_mask, causal, lambda total, fade: total * fade)


def blocked(model, q, k, v, attention_mask=None, causal=False):
    return attend(q, k, v, attention_mask, causal, lambda total, fade: total)


def subject(function):
    return Subject(
        kind="attention",
        name="blocks of keys",
        forward=function,
        mask_forms=("pairwise",),
        declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
    )


right = subject(tiled)
wrong = subject(blocked)
