"""Attention in tiles with an online softmax; key blocks that lie in the future of a query block are skipped."""

import torch

from veriformer.properties import Subject

WHAT = "A key block is skipped when it starts behind the query block's first row, not its last: part of the diagonal is lost."
CAUSE = (
    "In causal attention key blocks that lie partly in the past of a query block are skipped: the test compares the "
    "block's first key with the first query of the query block instead of its last, so late rows of a tile miss recent keys."
)
BLOCK_M, BLOCK_N = 64, 32


def make(last_row):
    def attend(model, q, k, v, causal=False):
        dtype = q.dtype
        if dtype in (torch.float16, torch.bfloat16):
            q, k, v = q.float(), k.float(), v.float()
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        T, S, scale = q.shape[2], k.shape[2], q.shape[-1] ** -0.5
        offset = S - T
        rows = []
        for start_m in range(0, T, BLOCK_M):
            q_block = q[:, :, start_m : start_m + BLOCK_M] * scale
            end_m = start_m + q_block.shape[2]
            row = torch.arange(start_m, end_m, device=q.device)[:, None] + offset
            m_i = q_block.new_full((*q_block.shape[:3], 1), -torch.inf)
            l_i = torch.zeros_like(m_i)
            acc = q_block.new_zeros((*q_block.shape[:3], v.shape[-1]))
            for start_n in range(0, S, BLOCK_N):
                if causal and start_n > last_row(start_m, end_m) + offset:
                    break
                k_block, v_block = k[:, :, start_n : start_n + BLOCK_N], v[:, :, start_n : start_n + BLOCK_N]
                scores = q_block @ k_block.transpose(-1, -2)
                if causal:
                    column = torch.arange(start_n, start_n + k_block.shape[2], device=q.device)
                    scores = scores.masked_fill(column > row, -torch.inf)
                m_new = torch.maximum(m_i, scores.amax(-1, keepdim=True).detach())
                base = torch.where(m_new == -torch.inf, 0.0, m_new)
                p = torch.exp(scores - base)
                alpha = torch.exp(m_i - base)
                l_i = l_i * alpha + p.sum(-1, keepdim=True)
                acc = acc * alpha + p @ v_block
                m_i = m_new
            rows.append(acc / torch.where(l_i == 0, 1.0, l_i))
        return torch.cat(rows, dim=2).to(dtype)

    return attend


def subject(last_row):
    return Subject(
        kind="attention",
        name="tiled attention",
        forward=make(last_row),
        declares={"causal_alignment": "bottom-right", "empty_row": "zeros"},
    )


right = subject(lambda start, end: end - 1)
wrong = subject(lambda start, end: start)
