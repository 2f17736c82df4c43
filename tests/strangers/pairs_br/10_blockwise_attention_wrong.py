WHAT = "the test that skips tiles of future keys forgets the offset S - T of the bottom-right causal mask: with more keys than queries, tiles that should be seen are skipped (line 25)"
"""Blockwise attention with an online softmax; tiles of keys that lie in the future of a whole tile of queries are skipped."""
import torch

from veriformer.properties import Subject

BLOCK_Q, BLOCK_K = 8, 4


def blockwise_attention(q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S, group = k.shape[2], H // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    qf = q.to(wide) * K**-0.5
    kf, vf = (t.to(wide).repeat_interleave(group, dim=1) for t in (k, v))
    offset = S - T  # the last query sees the last key
    out = []
    for q0 in range(0, T, BLOCK_Q):
        q1 = min(q0 + BLOCK_Q, T)
        rows = torch.arange(q0, q1, device=q.device)[:, None]
        m = torch.full((B, H, q1 - q0, 1), float("-inf"), dtype=wide, device=q.device)
        l = torch.zeros_like(m)
        acc = torch.zeros(B, H, q1 - q0, v.shape[-1], dtype=wide, device=q.device)
        for k0 in range(0, S, BLOCK_K):
            if causal and k0 > q1 - 1:
                break
            k1 = min(k0 + BLOCK_K, S)
            s = qf[:, :, q0:q1] @ kf[:, :, k0:k1].transpose(-1, -2)
            if causal:
                cols = torch.arange(k0, k1, device=q.device)[None, :]
                s = s.masked_fill(cols > rows + offset, float("-inf"))
            if attention_mask is not None:
                s = s.masked_fill(~attention_mask.expand(B, -1, T, S)[:, :, q0:q1, k0:k1], float("-inf"))
            m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            safe = m_new.masked_fill(m_new == float("-inf"), 0.0)
            p = (s - safe).exp()
            alpha = (m - safe).exp()
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ vf[:, :, k0:k1]
            m = m_new
        out.append(acc / l.masked_fill(l == 0, 1.0))
    return torch.cat(out, dim=2).to(q.dtype)


subject = Subject(
    kind="attention",
    name="blockwise attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: blockwise_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
