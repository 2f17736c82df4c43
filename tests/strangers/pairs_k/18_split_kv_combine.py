"""Attention with the keys split into parts that are computed apart and combined, as in flash-decoding."""

import torch

from veriformer.properties import Subject

WHAT = "The parts are combined by the exponential of their largest score instead of their log-sum-exp."
CAUSE = (
    "Parts of the keys are combined with wrong weights: by exp(max) of each part, not by exp(logsumexp), so a part with "
    "many large scores counts as much as one with a single one."
)
PART = 32


def part_of(q, k, v, allowed):
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    top = scores.amax(-1)
    safe = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - safe[..., None])
    total = weights.sum(-1)
    out = torch.einsum("bhts,bhse->bhte", weights, v) / torch.where(total == 0, 1.0, total)[..., None]
    return out, top, total


def by_lse(top, total):
    return torch.where(total == 0, -torch.inf, top + torch.log(torch.where(total == 0, 1.0, total)))


def by_top(top, total):
    return top


def make(size_of):
    def attend(model, q, k, v, attention_mask=None, causal=False):
        dtype = q.dtype
        if dtype in (torch.float16, torch.bfloat16):
            q, k, v = q.float(), k.float(), v.float()
        B, H, T = q.shape[:3]
        S = k.shape[2]
        allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(S - T)
        if attention_mask is not None:
            allowed = allowed & (attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask)
        outs, sizes = [], []
        for start in range(0, S, PART):
            here = slice(start, start + PART)
            out, top, total = part_of(q, k[:, :, here], v[:, :, here], allowed[..., here])
            outs.append(out)
            sizes.append(size_of(top, total))
        sizes = torch.stack(sizes)
        largest = sizes.detach().amax(0)
        shares = torch.exp(sizes - torch.where(largest == -torch.inf, 0.0, largest))
        whole = shares.sum(0)
        shares = shares / torch.where(whole == 0, 1.0, whole)
        return (torch.stack(outs) * shares[..., None]).sum(0).to(dtype)

    return attend


def subject(size_of):
    return Subject(
        kind="attention",
        name="attention with split keys",
        forward=make(size_of),
        mask_forms=("pairwise",),
        declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
    )


right = subject(by_lse)
wrong = subject(by_top)
