WHAT = "The bound of the tiles to visit under a causal mask forgets the shift S - T of the bottom-right diagonal, so with more keys than queries tiles of visible keys are skipped (line 25)."
"""Attention by tiles with an online softmax; tiles beyond the causal diagonal are no longer visited."""
import torch

from veriformer.properties import Subject

BLOCK_Q, BLOCK_K = 16, 16


def tiled_attention(q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(B, attention_mask.shape[1], T, S)
    shift = S - T  # the last query sees the last key
    rows = []
    for i0 in range(0, T, BLOCK_Q):
        i1 = min(i0 + BLOCK_Q, T)
        qi = q[:, :, i0:i1] * K**-0.5
        best = q.new_full((B, H, i1 - i0, 1), float("-inf"))
        total = q.new_zeros(B, H, i1 - i0, 1)
        mixed = q.new_zeros(B, H, i1 - i0, v.shape[-1])
        end = min(S, i1) if causal else S
        for j0 in range(0, end, BLOCK_K):
            j1 = min(j0 + BLOCK_K, S)
            scores = qi @ k[:, :, j0:j1].transpose(-1, -2)
            if causal:
                i = torch.arange(i0, i1, device=q.device)[:, None]
                j = torch.arange(j0, j1, device=q.device)[None, :]
                scores = scores.masked_fill(j > i + shift, float("-inf"))
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask[:, :, i0:i1, j0:j1], float("-inf"))
            new = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
            base = new.masked_fill(new == float("-inf"), 0.0)
            weights = (scores - base).exp()
            decay = (best - base).exp()
            total = total * decay + weights.sum(-1, keepdim=True)
            mixed = mixed * decay + weights @ v[:, :, j0:j1]
            best = new
        rows.append(mixed / total.masked_fill(total == 0, 1.0))
    return torch.cat(rows, dim=2)


def forward(model, q, k, v, attention_mask=None, causal=False):
    return tiled_attention(q, k, v, attention_mask, causal)


subject = Subject(
    kind="attention",
    name="tiles",
    forward=forward,
    mask_forms=("pairwise",),
    declares={
        "causal_alignment": "bottom-right",
        "empty_row": "zeros",
        "attention_scale": "1/sqrt(d_head)",
        "grouped_queries": True,
    },
)
