"""The feed-forward network of GPT-2: Conv1D layers and the tanh form of GELU."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Conv1D(nn.Module):
    """A linear layer whose weight is transposed."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(size_out)


class MLP(nn.Module):
    def __init__(self, n_state, nx, p):
        super().__init__()
        self.c_fc = Conv1D(n_state, nx)
        self.c_proj = Conv1D(nx, n_state)
        self.act = gelu_new
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        h = self.act(self.c_fc(x))
        return self.dropout(self.c_proj(h))


subject = Subject(
    kind="feed_forward",
    name="GPT-2 MLP",
    build=lambda c: MLP(c.d_ff, c.d_model, c.dropout),
    forward=lambda model, x: model(x),
    declares={"activation": "gelu_tanh", "bias": True},
)
