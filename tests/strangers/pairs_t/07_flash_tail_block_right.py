"""Attention by blocks of queries and keys with an online softmax, as a fused kernel walks them."""

import torch
from torch import nn

from veriformer.properties import Subject

BLOCK_Q = 16
BLOCK_K = 16


def pad_rows(x, block):
    """Zeros behind the rows of x [..., N, K], up to whole blocks: what a masked load gives."""
    missing = -x.shape[-2] % block
    return torch.cat((x, x.new_zeros(*x.shape[:-2], missing, x.shape[-1])), dim=-2) if missing else x


def block_allowed(rows, cols, keys, causal, offset, mask):
    """Which of the block's keys its queries may see; keys behind the last one never."""
    allowed = (cols < keys)[None, :].expand(len(rows), -1)
    if causal:
        allowed = allowed & (cols[None, :] <= rows[:, None] + offset)
    if mask is not None:
        r = rows.clamp(max=mask.shape[-2] - 1)
        s = cols.clamp(max=keys - 1)
        allowed = allowed & mask[..., r[:, None], s[None, :]] & (cols < keys)
    return allowed


def flash_attention(q, k, v, mask=None, causal=False):
    """q [B, H, T, K], k [B, G, S, K], v [B, G, S, E]; mask [..., T, S] of booleans, True may attend."""
    T, S = q.shape[-2], k.shape[-2]
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], T, S)
    scale = q.shape[-1] ** -0.5
    q, k, v = pad_rows(q, BLOCK_Q), pad_rows(k, BLOCK_K), pad_rows(v, BLOCK_K)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    outputs = []
    for i in range(0, q.shape[-2], BLOCK_Q):
        rows = torch.arange(i, i + BLOCK_Q, device=q.device)
        query = q[..., i : i + BLOCK_Q, :].to(wide) * scale
        top = query.new_full((*query.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(top)
        acc = query.new_zeros(*query.shape[:-1], v.shape[-1])
        for j in range(0, k.shape[-2], BLOCK_K):
            if causal and j > i + BLOCK_Q - 1 + (S - T):
                break  # all of these keys lie in the future
            cols = torch.arange(j, j + BLOCK_K, device=q.device)
            scores = query @ k[..., j : j + BLOCK_K, :].to(wide).transpose(-1, -2)
            scores = scores.masked_fill(~block_allowed(rows, cols, S, causal, S - T, mask), -torch.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            safe = torch.where(new_top == -torch.inf, torch.zeros_like(new_top), new_top)
            weights = (scores - safe).exp()
            shrink = (top - safe).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            acc = acc * shrink + weights @ v[..., j : j + BLOCK_K, :].to(wide)
            top = new_top
        outputs.append((acc / torch.where(total == 0, torch.ones_like(total), total)).to(v.dtype))
    return torch.cat(outputs, dim=-2)[..., :T, :]


class FlashAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        return flash_attention(q, k, v, attention_mask, causal)


subject = Subject(
    kind="attention",
    name="blockwise attention",
    build=lambda c: FlashAttention(),
    forward=lambda model, q, k, v, attention_mask=None, causal=False: model(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
)
