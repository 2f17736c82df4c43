"""Forward of FlashAttention in tiles, causal tiles beyond the diagonal are skipped; aligned bottom right."""
import math

import torch

from veriformer.properties import Subject

BM, BN = 8, 8


def flash(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S, group = k.shape[2], H // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(B, 1, T, S)
    q = q * (1.0 / math.sqrt(K))
    shift = S - T
    tiles = []
    for top in range(0, T, BM):
        end = min(top + BM, T)
        stop = max(0, min(S, end + shift)) if causal else S
        m = q.new_full((B, H, end - top, 1), -torch.inf)
        l = q.new_zeros(B, H, end - top, 1)
        acc = q.new_zeros(B, H, end - top, v.shape[-1])
        for left in range(0, stop, BN):
            right = min(left + BN, stop)
            s = q[:, :, top:end] @ k[:, :, left:right].mT
            if causal:
                i = torch.arange(top, end, device=q.device)[:, None] + shift
                j = torch.arange(left, right, device=q.device)
                s = s.masked_fill(j > i, -torch.inf)
            if attention_mask is not None:
                s = s.masked_fill(~attention_mask[:, :, top:end, left:right], -torch.inf)
            m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            safe = m_new.masked_fill(m_new.isinf(), 0.0)
            p, alpha = torch.exp(s - safe), torch.exp(m - safe)
            l = alpha * l + p.sum(-1, keepdim=True)
            acc = alpha * acc + p @ v[:, :, left:right]
            m = m_new
        tiles.append(acc / l.masked_fill(l == 0, 1.0))
    return torch.cat(tiles, 2)


subject = Subject(
    kind="attention",
    name="flash in tiles",
    forward=flash,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
