WHAT = "encoding() makes the distances T-1..0 alone (Transformer-XL's causal case) in a bidirectional attention (`distance = ...`): rel_shift then fills the scores of later keys with a zero (j = i+1) and with those of the next query i+1 (j > i+1)"
"""Relative self-attention of a Conformer (Transformer-XL style, both directions), as in ESPnet."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelPositionMultiHeadedAttention(nn.Module):
    def __init__(self, n_feat, n_head):
        super().__init__()
        self.h, self.d_k = n_head, n_feat // n_head
        self.linear_q = nn.Linear(n_feat, n_feat)
        self.linear_k = nn.Linear(n_feat, n_feat)
        self.linear_v = nn.Linear(n_feat, n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.linear_pos = nn.Linear(n_feat, n_feat, bias=False)
        self.pos_bias_u = nn.Parameter(torch.randn(n_head, self.d_k) * 0.1)
        self.pos_bias_v = nn.Parameter(torch.randn(n_head, self.d_k) * 0.1)

    def encoding(self, x):
        """Sinusoids of the distances i - j, from the largest to the smallest."""
        T, D = x.size(1), x.size(2)
        distance = torch.arange(T - 1, -1, -1, dtype=x.dtype, device=x.device)
        freq = torch.exp(torch.arange(0, D, 2, dtype=x.dtype, device=x.device) * -(math.log(10000.0) / D))
        pe = x.new_zeros(distance.numel(), D)
        pe[:, 0::2] = torch.sin(distance[:, None] * freq)
        pe[:, 1::2] = torch.cos(distance[:, None] * freq)[:, : D // 2]
        return pe

    @staticmethod
    def rel_shift(x):
        """[B, H, T, P] over distances -> [B, H, T, T] over keys."""
        B, H, T, P = x.shape
        padded = torch.cat([x.new_zeros(B, H, T, 1), x], dim=-1).view(B, H, P + 1, T)
        return padded[:, :, 1:].reshape(B, H, T, P)[..., :T]

    def forward(self, x, mask=None):
        B, T, D = x.shape
        q = self.linear_q(x).view(B, T, self.h, self.d_k)
        k = self.linear_k(x).view(B, T, self.h, self.d_k).transpose(1, 2)
        v = self.linear_v(x).view(B, T, self.h, self.d_k).transpose(1, 2)
        p = self.linear_pos(self.encoding(x)).view(-1, self.h, self.d_k).transpose(0, 1)
        content = (q + self.pos_bias_u).transpose(1, 2) @ k.transpose(-2, -1)
        position = self.rel_shift((q + self.pos_bias_v).transpose(1, 2) @ p.transpose(-2, -1))
        scores = (content + position) / math.sqrt(self.d_k)
        if mask is not None:
            mask = mask[:, None, None, :] if mask.shape == (B, T) and mask.dim() == 2 else mask.view(-1, 1, T, T)
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return self.linear_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="conformer attention",
    build=lambda c: RelPositionMultiHeadedAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "relative", "bias": True},
)
