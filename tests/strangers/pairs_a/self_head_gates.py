import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The learned gates of the heads are kept as nn.Parameters in a plain Python list, so they are neither '
    'in parameters() nor in state_dict(): they are never trained, and a saved model loaded into a fresh '
    'one gives other outputs.'
)
PLACE = 'per-head gates of self-attention, parameter registration'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


class GatedHeads(nn.Module):
    """Each head's output is multiplied by a learned gate."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        gates = [nn.Parameter(1 + 0.5 * torch.randn(())) for _ in range(h)]
        self.gates = nn.ParameterList(gates)

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        y = attend(q, k, v, allowed)
        y = torch.stack([y[:, i] * gate for i, gate in enumerate(self.gates)], 2)
        return self.out(y.flatten(2))


class GatedHeads2(nn.Module):
    """Each head's output is multiplied by a learned gate."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        gates = [nn.Parameter(1 + 0.5 * torch.randn(())) for _ in range(h)]
        self.gates = gates

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        y = attend(q, k, v, allowed)
        y = torch.stack([y[:, i] * gate for i, gate in enumerate(self.gates)], 2)
        return self.out(y.flatten(2))


right = Subject(
    kind="self_attention",
    build=lambda c: GatedHeads(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "empty_row": "zeros"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="self_attention",
    build=lambda c: GatedHeads2(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "empty_row": "zeros"},
    mask_forms=("padding",),
)
