import math

import torch
from torch import nn

from veriformer.properties import Subject


class NewGELU(nn.Module):
    def forward(self, x):
        c = math.sqrt(2.0 / math.pi)
        return 0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * x * x * x)))


class MLP(nn.Module):
    def __init__(self, n_embd, n_inner):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.act = NewGELU()
        self.c_proj = nn.Linear(n_inner, n_embd)

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


subject = Subject(
    kind="feed_forward",
    name="GPT-2's MLP",
    build=lambda c: MLP(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu_tanh", "bias": True},
)
