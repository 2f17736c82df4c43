WHAT = "attention kernel with an online softmax over tiles of 16 x 16 and a backward by hand that computes the tiles again from the log-sum-exp; tiles beyond the diagonal are skipped; rows that see nothing give zeros"
import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

TILE = 16


def tile(q, k, mask, causal, i, j, scale):
    """Scores of a tile in wide numbers, -inf where hidden; None where all of it lies in the future."""
    T, S = q.shape[-2], k.shape[-2]
    rows = torch.arange(i, min(i + TILE, T), device=q.device)[:, None] + (S - T)  # bottom-right
    columns = torch.arange(j, min(j + TILE, S), device=q.device)
    if causal and j > i + TILE - 1 + S - T:
        return None
    s = (q[..., i : i + TILE, :] @ k[..., j : j + TILE, :].mT) * scale
    if causal:
        s = s.masked_fill(columns > rows, -math.inf)
    if mask is not None:
        part = mask[..., i : i + TILE, j : j + TILE] if mask.shape[-2] > 1 else mask[..., j : j + TILE]
        s = s.masked_fill(~part, -math.inf)
    return s


class Tiled(Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, causal):
        wide = torch.promote_types(q.dtype, torch.float32)
        a, b, c, scale = q.to(wide), k.to(wide), v.to(wide), 1 / math.sqrt(q.shape[-1])
        T, S = q.shape[-2], k.shape[-2]
        out, lse = a.new_zeros(*q.shape[:-1], v.shape[-1]), a.new_full(q.shape[:-1], -math.inf)
        for i in range(0, T, TILE):
            n = min(TILE, T - i)
            best, total = a.new_full((*q.shape[:-2], n), -math.inf), a.new_zeros(*q.shape[:-2], n)
            mixed = a.new_zeros(*q.shape[:-2], n, v.shape[-1])
            for j in range(0, S, TILE):
                s = tile(a, b, mask, causal, i, j, scale)
                if s is None:
                    continue
                new = torch.maximum(best, s.amax(-1))
                safe = torch.where(new.isinf(), 0.0, new)
                p, old = (s - safe[..., None]).exp(), (best - safe).exp()
                total = total * old + p.sum(-1)
                mixed = mixed * old[..., None] + p @ c[..., j : j + TILE, :]
                best = new
            some = total > 0
            out[..., i : i + n, :] = mixed / torch.where(some, total, 1.0)[..., None]
            lse[..., i : i + n] = torch.where(some, best + total.clamp(min=torch.finfo(wide).tiny).log(), math.inf)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.causal = causal
        return out.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        q, k, v, mask, out, lse = ctx.saved_tensors
        wide = out.dtype
        a, b, c, g, scale = q.to(wide), k.to(wide), v.to(wide), g.to(wide), 1 / math.sqrt(q.shape[-1])
        da, db, dc = torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(c)
        delta = (g * out).sum(-1)
        for i in range(0, q.shape[-2], TILE):
            rows = slice(i, i + TILE)
            for j in range(0, k.shape[-2], TILE):
                s = tile(a, b, mask, ctx.causal, i, j, scale)
                if s is None:
                    continue
                columns = slice(j, j + TILE)
                p = (s - lse[..., rows, None]).exp()  # a row without keys has lse = +inf: zeros
                dc[..., columns, :] += p.mT @ g[..., rows, :]
                ds = p * (g[..., rows, :] @ c[..., columns, :].mT - delta[..., rows, None]) * scale
                da[..., rows, :] += ds @ b[..., columns, :]
                db[..., columns, :] += ds.mT @ a[..., rows, :]
        return da.to(q.dtype), db.to(k.dtype), dc.to(v.dtype), None, None


def attend(q, k, v, mask, causal):
    """mask broadcasts to [B, H, T, S]."""
    many = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(many, 1), v.repeat_interleave(many, 1)
    return Tiled.apply(q, k, v, mask, causal)


from veriformer.properties import Subject


def padding(model, q, k, v, attention_mask=None, causal=False):  # [B, S]
    return attend(q, k, v, None if attention_mask is None else attention_mask[:, None, None, :], causal)


def pairwise(model, q, k, v, attention_mask=None, causal=False):  # [T, S] or [B, T, S]
    if attention_mask is not None and attention_mask.ndim == 3:
        attention_mask = attention_mask[:, None]
    return attend(q, k, v, attention_mask, causal)


undeclared = Subject(kind="attention", forward=padding)
declared = Subject(
    kind="attention", name="tiles", forward=pairwise, mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True, "memory": "linear",
              "once_differentiable": True, "half_precision": True},
)
