"""The position-wise feed-forward as two convolutions of width one, as the paper describes it."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class PositionwiseConv(nn.Module):
    def __init__(self, d, hidden, p, bad):
        super().__init__()
        self.w_1, self.w_2, self.drop = nn.Conv1d(d, hidden, 1), nn.Conv1d(hidden, d, 1), nn.Dropout(p)
        self.bad = bad

    def forward(self, x):
        b, t, d = x.shape
        y = x.reshape(b, d, t) if self.bad else x.transpose(1, 2)
        y = self.w_2(self.drop(F.relu(self.w_1(y))))
        return y.reshape(b, t, d) if self.bad else y.transpose(1, 2)


def subject(bad):
    return Subject(kind="feed_forward", build=lambda c: PositionwiseConv(c.d_model, c.d_ff, c.dropout, bad), forward=lambda m, x: m(x))


right, wrong = subject(False), subject(True)
WHAT = "Before (and after) the convolutions [B, T, D] is reshaped to [B, D, T] instead of transposed, which mixes positions and channels."
PLACE = "layout before the width-one convolutions"
