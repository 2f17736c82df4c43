WHAT = "the table of relative positions runs upwards though the relative shift expects it from the farthest distance down to 0, so the key at distance n is scored as if at T - 1 - n, which changes with the length of the sequence (line 47: pos_seq = torch.arange(t, device=x.device, dtype=x.dtype))"
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class RelMultiHeadAttn(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, self.d_head) * 0.1)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, self.d_head) * 0.1)

    @staticmethod
    def _rel_shift(x):
        b, n, q, k = x.shape
        x = F.pad(x, (1, 0)).view(b, n, k + 1, q)
        return x[:, :, 1:].reshape(b, n, q, k)

    def forward(self, w, r, allowed):
        b, t, d = w.shape
        q, k, v = (z.view(b, t, self.n_head, self.d_head) for z in self.qkv_net(w).chunk(3, dim=-1))
        rk = self.r_net(r).view(t, self.n_head, self.d_head)
        ac = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        bd = self._rel_shift(torch.einsum("bind,jnd->bnij", q + self.r_r_bias, rk))
        score = (ac + bd) / math.sqrt(self.d_head)
        prob = score.masked_fill(~allowed, torch.finfo(score.dtype).min).softmax(-1) * allowed
        return self.o_net(torch.einsum("bnij,bjnd->bind", prob, v).reshape(b, t, d))


class XLLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.attn = RelMultiHeadAttn(d, h)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def forward(self, x, attention_mask=None):
        t, d = x.shape[1:]
        pos_seq = torch.arange(t, device=x.device, dtype=x.dtype)
        inv_freq = 1 / (10000 ** (torch.arange(0, d, 2, device=x.device, dtype=x.dtype) / d))
        angles = torch.outer(pos_seq, inv_freq)
        r = torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :d]
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        x = self.norm1(x + self.attn(x, r, allowed))
        return self.norm2(x + self.ff(x))


subject = Subject(
    kind="layer",
    build=lambda c: XLLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "positions": "relative", "norm_placement": "post", "activation": "relu", "structure": "other"},
)
