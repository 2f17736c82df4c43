WHAT = 'The fused bias-GELU adds the bias behind the activation instead of in front of it (line 25).'
"""Megatron's MLP: the first linear map leaves its bias to the activation, which fuses the two."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class ColumnLinear(nn.Module):
    """Gives the product and the bias apart from one another (skip_bias_add)."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out))
        nn.init.xavier_uniform_(self.weight)
        nn.init.uniform_(self.bias, -0.3, 0.3)

    def forward(self, x):
        return F.linear(x, self.weight), self.bias


def bias_gelu(bias, y):
    return F.gelu(y) + bias


class ParallelMLP(nn.Module):
    def __init__(self, hidden_size, ffn_hidden_size):
        super().__init__()
        self.dense_h_to_4h = ColumnLinear(hidden_size, ffn_hidden_size)
        self.dense_4h_to_h = nn.Linear(ffn_hidden_size, hidden_size)

    def forward(self, hidden_states):
        intermediate, bias = self.dense_h_to_4h(hidden_states)
        return self.dense_4h_to_h(bias_gelu(bias, intermediate))


subject = Subject(
    kind="feed_forward",
    name="ParallelMLP",
    build=lambda c: ParallelMLP(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu", "bias": True},
)
