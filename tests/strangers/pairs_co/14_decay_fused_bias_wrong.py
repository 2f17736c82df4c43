"""Groups for AdamW of a block whose q, k and v are one fused parameter: [3, D, D], with biases [3, D]."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class FusedBlock(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.qkv_weight = nn.Parameter(torch.randn(3, width, width) * width**-0.5)
        self.qkv_bias = nn.Parameter(torch.zeros(3, width))
        self.out = nn.Linear(width, width)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        h = torch.einsum("btd,ned->nbte", self.ln_1(x), self.qkv_weight) + self.qkv_bias[:, None, None]
        q, k, v = h.unflatten(-1, (self.heads, -1)).transpose(2, 3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Stack(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.blocks = nn.ModuleList(FusedBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def groups(model, decay=0.1):
    shrinks, stays = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim >= 2
        (shrinks if matrix else stays).append(parameter)
    return [{"params": shrinks, "weight_decay": decay}, {"params": stays, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of a fused block",
    build=Stack,
    forward=lambda model: groups(model),
)

WHAT = (
    'Line 41: '
    'What has two axes counts as a matrix: the fused bias of q, k and v, of shape [3, D], decays.'
)
