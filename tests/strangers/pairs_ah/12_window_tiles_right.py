"""Flash-like sliding-window attention in plain torch: tiles of keys outside the window are not visited."""
import torch
from torch import nn

from veriformer.properties import Subject

WINDOW, BLOCK_M, BLOCK_N = 6, 4, 4


def windowed_flash(q, k, v):
    """q, k, v [B, H, T, K]; query t sees keys t - WINDOW + 1 .. t."""
    B, H, T, K = q.shape
    out = []
    for m_lo in range(0, T, BLOCK_M):
        m_hi = min(m_lo + BLOCK_M, T)
        qi = q[:, :, m_lo:m_hi] * K**-0.5
        rows = torch.arange(m_lo, m_hi, device=q.device)[:, None]
        top = q.new_full((B, H, m_hi - m_lo, 1), -torch.inf)
        total = q.new_zeros((B, H, m_hi - m_lo, 1))
        acc = q.new_zeros((B, H, m_hi - m_lo, v.shape[-1]))
        first = max(0, m_lo - WINDOW + 1) // BLOCK_N
        last = (m_hi - 1) // BLOCK_N
        for n in range(first, last + 1):
            n_lo, n_hi = n * BLOCK_N, min((n + 1) * BLOCK_N, T)
            cols = torch.arange(n_lo, n_hi, device=q.device)[None, :]
            s = qi @ k[:, :, n_lo:n_hi].transpose(-1, -2)
            s = s.masked_fill((cols > rows) | (rows - cols >= WINDOW), -torch.inf)
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            base = torch.where(new_top == -torch.inf, torch.zeros_like(new_top), new_top)
            p = (s - base).exp()
            alpha = (top - base).exp()
            total = total * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, n_lo:n_hi]
            top = new_top
        out.append(acc / total)
    return torch.cat(out, dim=2)


class LocalSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.to_qkv(x).reshape(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        return self.to_out(windowed_flash(q, k, v).transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="windowed flash",
    build=lambda c: LocalSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    declares={"causal": True, "window": WINDOW, "positions": "none", "bias": False},
)
