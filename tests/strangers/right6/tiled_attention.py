"""Attention by tiles of queries and keys with an online softmax; grouped heads, any pairwise mask."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class Tiled(nn.Module):
    def __init__(self, block_q=5, block_k=7):
        super().__init__()
        self.block_q, self.block_k = block_q, block_k

    def forward(self, q, k, v, mask=None, causal=False):
        out_dtype = q.dtype
        work = torch.float64 if out_dtype == torch.float64 else torch.float32
        q, k, v = q.to(work), k.to(work), v.to(work)
        B, H, T, K = q.shape
        G, S = k.shape[1], k.shape[2]
        q = q.reshape(B, G, H // G, T, K) * K**-0.5
        k, v = k[:, :, None], v[:, :, None]
        if mask is not None:
            mask = mask.bool().expand(B, mask.shape[1], T, S)
            mask = mask.expand(B, H, T, S).unflatten(1, (G, H // G))
        rows = []
        for t0 in range(0, T, self.block_q):
            t1 = min(t0 + self.block_q, T)
            qt = q[..., t0:t1, :]
            top = qt.new_full(qt.shape[:-1], -torch.inf)
            total = qt.new_zeros(qt.shape[:-1])
            acc = qt.new_zeros(*qt.shape[:-1], v.shape[-1])
            for s0 in range(0, S, self.block_k):
                s1 = min(s0 + self.block_k, S)
                if causal and s0 > t1 - 1 + (S - T):
                    break
                scores = qt @ k[..., s0:s1, :].transpose(-1, -2)
                if causal:
                    i = torch.arange(t0, t1, device=q.device)[:, None] + (S - T)
                    scores = scores.masked_fill(torch.arange(s0, s1, device=q.device) > i, -torch.inf)
                if mask is not None:
                    scores = scores.masked_fill(~mask[..., t0:t1, s0:s1], -torch.inf)
                new = torch.maximum(top, scores.detach().amax(-1))
                safe = torch.where(new.isinf(), torch.zeros_like(new), new)
                p = (scores - safe[..., None]).exp()
                keep = (top - safe).exp()
                total = total * keep + p.sum(-1)
                acc = acc * keep[..., None] + p @ v[..., s0:s1, :]
                top = new
            rows.append(acc / torch.where(total == 0, torch.ones_like(total), total)[..., None])
        return torch.cat(rows, -2).flatten(1, 2).to(out_dtype)


def build(c: DrawnConfig):
    return Tiled()


def forward(model, q, k, v, attention_mask=None, causal=False):
    if attention_mask is not None and attention_mask.dim() != 4:
        raise ValueError("masks are [B, 1, T, S]")
    return model(q, k, v, attention_mask, causal)


declared = Subject(
    kind="attention", name="tiled attention", build=build, forward=forward, mask_forms=("pairwise",),
    declares={
        "empty_row": "zeros", "causal_alignment": "bottom-right", "attention_scale": "1/sqrt(d_head)", "sink": False,
        "grouped_queries": True, "memory": "linear",
    },
)
undeclared = Subject(kind="attention", build=build, forward=forward)
