WHAT = 'the padding mask is repeated head after head (mask.repeat) while the folded batch runs sample after sample, so a head of one sample gets the mask of another sample (line 25: keys = mask.repeat(self.h, 1))'
"""Self-attention with heads folded into the batch, as in the bmm days of fairseq."""
import torch
from torch import nn

from veriformer.properties import Subject


class FoldedAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def fold(self, t):
        B, T, D = t.shape
        return t.reshape(B, T, self.h, D // self.h).permute(0, 2, 1, 3).reshape(B * self.h, T, D // self.h)

    def forward(self, x, mask=None):
        B, T, D = x.shape
        q, k, v = map(self.fold, self.in_proj(x).chunk(3, dim=-1))
        scores = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2))
        if mask is not None:
            keys = mask.repeat(self.h, 1)
            scores = scores.masked_fill(~keys[:, None, :], torch.finfo(scores.dtype).min)
        out = torch.bmm(scores.softmax(-1), v)
        out = out.view(B, self.h, T, -1).permute(0, 2, 1, 3).reshape(B, T, D)
        return self.out_proj(out)


subject = Subject(
    kind="self_attention",
    name="folded attention",
    build=lambda c: FoldedAttention(c.d_model, c.num_heads),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False},
)
