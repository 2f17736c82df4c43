WHAT = "attention kernel in einsum with one-letter axes, heads of one key-value head as an axis of their own (keys are never repeated), queries in chunks of 5; a lowest finite fill: rows that see nothing give the mean"
import torch
from torch import nn

CHUNK = 5


class Grouped(nn.Module):
    def forward(self, q, k, v, mask=None, causal=False):  # mask broadcasts to [B, T, S]
        B, H, T, K = q.shape
        G, S = k.shape[1:3]
        if T == 0:
            return v.new_zeros(B, H, T, v.shape[-1])
        q = q.reshape(B, G, H // G, T, K).mul(K**-0.25)
        k = k.mul(K**-0.25)
        key, out = torch.arange(S, device=q.device), []
        for a in range(0, T, CHUNK):
            p = q[:, :, :, a : a + CHUNK]
            n = p.shape[3]
            s = torch.einsum("bgmtk,bgsk->bgmts", p, k).to(torch.promote_types(q.dtype, torch.float32))
            low = torch.finfo(s.dtype).min
            if causal:  # top-left
                s = s.masked_fill(key[None] > torch.arange(a, a + n, device=q.device)[:, None], low)
            if mask is not None:
                part = mask if mask.shape[-2] == 1 else mask[..., a : a + n, :]
                s = s.masked_fill(~(part if part.ndim == 2 else part[:, None, None]), low)
            w = s.softmax(-1).to(v.dtype)
            out.append(torch.einsum("bgmts,bgse->bgmte", w, v))
        return torch.cat(out, 3).reshape(B, H, T, -1)


from veriformer.properties import Subject


def padding(model, q, k, v, attention_mask=None, causal=False):  # [B, S]
    return model(q, k, v, None if attention_mask is None else attention_mask[:, None], causal)


def pairwise(model, q, k, v, attention_mask=None, causal=False):  # [T, S] or [B, T, S]
    return model(q, k, v, attention_mask, causal)


def build(c):
    return Grouped()


undeclared = Subject(kind="attention", build=build, forward=padding)
declared = Subject(
    kind="attention", name="einsum grouped", build=build, forward=pairwise, mask_forms=("pairwise",),
    declares={"empty_row": "mean", "causal_alignment": "top-left", "grouped_queries": True},
)
