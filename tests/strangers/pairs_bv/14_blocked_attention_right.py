import torch
import torch.nn as nn

from veriformer.properties import Subject


BLOCK = 2


def blocked_attention(q, k, v, attention_mask=None, causal=False):
    """Online softmax over tiles of BLOCK queries and keys, as FlashAttention does it."""
    B, H, T, K = q.shape
    S, G = k.shape[2], k.shape[1]
    k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
    offset = S - T
    scale = K**-0.5
    low = torch.finfo(q.dtype).min
    if attention_mask is not None:
        attention_mask = attention_mask.expand(B, attention_mask.shape[1], T, S)
    tiles = []
    for q0 in range(0, T, BLOCK):
        q1 = min(q0 + BLOCK, T)
        acc = q.new_zeros(B, H, q1 - q0, v.shape[-1])
        m = q.new_full((B, H, q1 - q0, 1), low)
        l = q.new_zeros(B, H, q1 - q0, 1)
        for k0 in range(0, S, BLOCK):
            k1 = min(k0 + BLOCK, S)
            if causal and k0 > q1 - 1 + offset:
                break
            s = q[:, :, q0:q1] @ k[:, :, k0:k1].transpose(-1, -2) * scale
            allowed = torch.ones(1, 1, q1 - q0, k1 - k0, dtype=torch.bool, device=q.device)
            if causal:
                rows = torch.arange(q0, q1, device=q.device)[:, None] + offset
                allowed = allowed & (torch.arange(k0, k1, device=q.device)[None] <= rows)
            if attention_mask is not None:
                allowed = allowed & attention_mask[:, :, q0:q1, k0:k1]
            s = s.masked_fill(~allowed, low)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p = (s - m_new).exp() * allowed
            alpha = (m - m_new).exp()
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, k0:k1]
            m = m_new
        tiles.append(acc / torch.where(l == 0, torch.ones_like(l), l))
    return torch.cat(tiles, dim=2)


subject = Subject(
    kind="attention",
    forward=lambda m, q, k, v, attention_mask=None, causal=False: blocked_attention(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
)
