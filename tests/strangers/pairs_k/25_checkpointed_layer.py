"""An encoder layer that is always checkpointed while it trains."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject

WHAT = "Checkpointing does not keep the generator's state, so the recomputed forward has other dropout masks."
CAUSE = (
    "In train mode the backward uses other dropout masks than the forward: the layer is recomputed by checkpoint with "
    "preserve_rng_state=False."
)


def make(**options):
    class EncoderLayer(nn.Module):
        def __init__(self, d_model, nhead, dim_feedforward, dropout):
            super().__init__()
            self.in_proj, self.out_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
            self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
            self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
            self.dropout, self.nhead = nn.Dropout(dropout), nhead

        def _attend(self, x, mask):
            B, T, D = x.shape
            q, k, v = self.in_proj(x).chunk(3, -1)
            q, k, v = (t.view(B, T, self.nhead, D // self.nhead).transpose(1, 2) for t in (q, k, v))
            scores = (q @ k.transpose(-1, -2)) / (D // self.nhead) ** 0.5
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
            weights = self.dropout(scores.softmax(-1))
            return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, D))

        def _run(self, x, mask):
            x = x + self.dropout(self._attend(self.norm1(x), mask))
            return x + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(self.norm2(x))))))

        def forward(self, x, mask=None):
            if self.training:
                return checkpoint(self._run, x, mask, use_reentrant=False, **options)
            return self._run(x, mask)

    return EncoderLayer


def subject(**options):
    layer = make(**options)
    return Subject(
        kind="layer",
        name="checkpointed encoder layer",
        build=lambda c: layer(c.d_model, c.num_heads, c.d_ff, c.dropout),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        mask_forms=("padding",),
    )


right = subject()
wrong = subject(preserve_rng_state=False)
