"""fairseq's learned positions: row padding_idx = 1 belongs to padding, the first token has row padding_idx + 1 = 2."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class LearnedPositions(nn.Embedding):
    def __init__(self, rows, d, bad, padding_idx=1):
        super().__init__(rows + padding_idx + 1, d, padding_idx=padding_idx)
        self.first = padding_idx if bad else padding_idx + 1
        self.rows = rows

    def forward(self, length):
        if length > self.rows:
            raise IndexError(f"{length} positions asked for, the table has {self.rows}")
        return super().forward(torch.arange(self.first, self.first + length, device=self.weight.device))


def subject(bad):
    return Subject(kind="positions", build=lambda c: LearnedPositions(c.max_len, c.d_model, bad), forward=lambda m, length: m(length),
                   declares={"positions": "learned", "position_offset": 2, "beyond_max_len": "error"})


right, wrong = subject(False), subject(True)
WHAT = "The first position is row 1 of the table (the padding row, zero and never trained) instead of row 2."
PLACE = "index of the first learned position"
