WHAT = 'The loop over key blocks skips blocks that lie behind the last query as if the causal diagonal were top-left, while the mask is aligned bottom-right: with S > T the last visible key blocks are lost (line 28).'
import math

import torch

from veriformer.properties import Subject

BLOCK = 16


def blockwise_attention(q, k, v, attention_mask=None, causal=False):
    """Online softmax over blocks of keys (Rabe & Staats). Causal is aligned to the last key."""
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    b, h, t, d = q.shape
    g, s = k.shape[1], k.shape[2]
    if g != h:
        k = k.repeat_interleave(h // g, dim=1)
        v = v.repeat_interleave(h // g, dim=1)
    offset = s - t
    rows = torch.arange(t, device=q.device)[:, None] + offset
    q = q / math.sqrt(d)
    m = q.new_full((b, h, t, 1), float("-inf"))
    l = q.new_zeros(b, h, t, 1)
    acc = q.new_zeros(b, h, t, v.shape[-1])
    for start in range(0, s, BLOCK):
        if causal and start > t - 1:
            break  # every key from here on lies in the future of every query
        end = min(start + BLOCK, s)
        sc = q @ k[:, :, start:end].transpose(-1, -2)
        if causal:
            cols = torch.arange(start, end, device=q.device)[None, :]
            sc = sc.masked_fill(cols > rows, float("-inf"))
        if attention_mask is not None:
            sc = sc.masked_fill(~attention_mask[..., start:end], float("-inf"))
        m_new = torch.maximum(m, sc.amax(-1, keepdim=True))
        m_safe = torch.where(torch.isinf(m_new), torch.zeros_like(m_new), m_new)
        p = torch.exp(sc - m_safe)
        alpha = torch.exp(m - m_safe)
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ v[:, :, start:end]
        m = m_new
    return (acc / torch.where(l == 0, torch.ones_like(l), l)).to(dtype)


subject = Subject(
    kind="attention",
    name="blockwise attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: blockwise_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
