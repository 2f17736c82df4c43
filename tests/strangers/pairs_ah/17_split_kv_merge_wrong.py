WHAT = "The splits' log-sum-exps are in base 2, but merge() weighs them with exp (base e): where there is more than one split of keys the splits are mixed by wrong weights (line 30: `w = torch.exp(lse - top)`)."
"""Flash-decoding in torch: every split of the keys gives its own output and log-sum-exp (base 2, as the kernel has it); then they are merged."""
import math

import torch

from veriformer.properties import Subject

SPLIT = 4
LOG2E = math.log2(math.e)


def partial(q, k, v, allowed):
    """Return the normalised output of one split, and the log2 of its sum of exponentials."""
    s = (q * (LOG2E / math.sqrt(q.size(-1)))) @ k.transpose(-2, -1)
    s = s.masked_fill(~allowed, float("-inf"))
    m = s.amax(-1, keepdim=True).detach()
    m = torch.where(m.isinf(), torch.zeros_like(m), m)
    p = torch.exp2(s - m)
    l = p.sum(-1, keepdim=True)
    some = l > 0
    safe = torch.where(some, l, torch.ones_like(l))
    return p @ v / safe, torch.where(some, m + torch.log2(safe), torch.full_like(l, float("-inf")))


def merge(outputs, lses):
    o, lse = torch.stack(outputs), torch.stack(lses)
    top = lse.amax(0).detach()
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    w = torch.exp(lse - top)
    total = w.sum(0)
    return (w * o).sum(0) / torch.where(total > 0, total, torch.ones_like(total))


def flash_decoding(q, k, v, attention_mask=None, causal=False):
    B, H, T, _ = q.shape
    S = k.size(2)
    k, v = (z.repeat_interleave(H // z.size(1), dim=1) for z in (k, v))
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.expand(B, H, T, S)
    parts = [
        partial(q, k[:, :, i:i + SPLIT], v[:, :, i:i + SPLIT], allowed[..., i:i + SPLIT]) for i in range(0, S, SPLIT)
    ]
    return merge(*zip(*parts))


subject = Subject(
    kind="attention",
    name="flash decoding",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: flash_decoding(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
