WHAT = "The loop over key blocks of a causal query block stops at the query block's own end (`limit = min(end, S)`), without the offset S - T of the bottom-right diagonal, so with more keys than queries visible keys are skipped (line 28)."
# Two-level tiling (queries x keys). Blocks that lie wholly above the diagonal are never visited.
import torch

from veriformer.properties import Subject

BLOCK_M, BLOCK_N = 8, 8


def tiled_attention(q, k, v, mask=None, causal=False):
    T, S = q.size(-2), k.size(-2)
    if k.size(1) != q.size(1):
        k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
        v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    q = q * q.size(-1) ** -0.5
    offset = S - T  # the last query sees the last key
    rows = torch.arange(T, device=q.device)
    cols = torch.arange(S, device=q.device)
    tiles = []
    for start in range(0, T, BLOCK_M):
        end = min(start + BLOCK_M, T)
        q_i = q[..., start:end, :]
        m = q.new_full((*q_i.shape[:-1], 1), float("-inf"))
        l = torch.zeros_like(m)
        acc = q.new_zeros(*q_i.shape[:-1], v.size(-1))
        limit = S
        if causal:
            limit = min(end, S)
        for n in range(0, limit, BLOCK_N):
            stop = min(n + BLOCK_N, S)
            s = q_i @ k[..., n:stop, :].transpose(-1, -2)
            if causal:
                s = s.masked_fill(cols[None, n:stop] > rows[start:end, None] + offset, float("-inf"))
            if mask is not None:
                s = s.masked_fill(~mask[..., start:end, n:stop], float("-inf"))
            m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            safe = m_new.masked_fill(m_new == float("-inf"), 0.0)
            p = torch.exp(s - safe)
            scale = torch.exp(m - safe)
            l = l * scale + p.sum(-1, keepdim=True)
            acc = acc * scale + p @ v[..., n:stop, :]
            m = m_new
        tiles.append(acc / torch.where(l == 0, torch.ones_like(l), l))
    return torch.cat(tiles, dim=-2)


def call(model, q, k, v, attention_mask=None, causal=False):
    if attention_mask is not None and attention_mask.dim() == 3:
        attention_mask = attention_mask.unsqueeze(1)
    wide = torch.promote_types(q.dtype, torch.float32)
    return tiled_attention(q.to(wide), k.to(wide), v.to(wide), attention_mask, causal).to(q.dtype)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=call,
    mask_forms=("pairwise",),
    declares={"causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True},
)
