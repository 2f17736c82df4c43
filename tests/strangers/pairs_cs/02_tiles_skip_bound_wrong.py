"""Tiled attention with an online softmax; tiles that lie wholly above the causal diagonal are never visited."""
import torch

from veriformer.properties import Subject

BLOCK_M, BLOCK_N = 16, 16


def flash(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    offset = S - T
    mask = None if attention_mask is None else attention_mask.expand(B, H, T, S)
    blocks = []
    for m0 in range(0, T, BLOCK_M):
        m1 = min(m0 + BLOCK_M, T)
        rows = torch.arange(m0, m1, device=q.device)[:, None] + offset
        q_blk = q[:, :, m0:m1].to(wide) * K**-0.5
        best = q_blk.new_full((B, H, m1 - m0, 1), -torch.inf)
        total = q_blk.new_zeros(B, H, m1 - m0, 1)
        acc = q_blk.new_zeros(B, H, m1 - m0, v.shape[-1])
        end = min(S, m1) if causal else S
        for n0 in range(0, end, BLOCK_N):
            n1 = min(n0 + BLOCK_N, S)
            scores = q_blk @ k[:, :, n0:n1].to(wide).transpose(-1, -2)
            if causal:
                columns = torch.arange(n0, n1, device=q.device)
                scores = scores.masked_fill(columns > rows, -torch.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, :, m0:m1, n0:n1], -torch.inf)
            higher = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
            safe = higher.masked_fill(higher.isinf(), 0.0)
            alpha = torch.exp(best - safe)
            p = torch.exp(scores - safe)
            total = total * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, n0:n1].to(wide)
            best = higher
        blocks.append(acc / total.masked_fill(total == 0, 1.0))
    return torch.cat(blocks, dim=2).to(q.dtype)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=flash,
    mask_forms=("pairwise",),
    declares={"causal_alignment": "bottom-right", "empty_row": "zeros"},
)

WHAT = (
    'The bound that skips tiles of the future forgets the offset S - T of the bottom-right diagonal (line 24): with more keys than queries whole tiles of visible keys are left out.'
)
