"""Groups for AdamW of a CaiT-like model: matrices decay; biases, gains and LayerScale do not."""
import torch
from torch import nn

from veriformer.properties import Subject


class ScaledBlock(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)
        self.gamma1, self.gamma2 = nn.Parameter(torch.full((d,), 0.1)), nn.Parameter(torch.full((d,), 0.1))
        self.h = h

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (self.h, -1)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.gamma1 * self.proj(y)
        return x + self.gamma2 * self.fc2(nn.functional.gelu(self.fc1(self.n2(x))))


class CaiT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.stem = nn.Linear(c.d_model, c.d_model)
        self.blocks = nn.Sequential(*[ScaledBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x))).mean(1))


def groups(model, weight_decay=0.05):
    decay, plain = [], []
    for module in model.modules():
        own = module.parameters(recurse=False)
        if isinstance(module, nn.Linear):
            for parameter in own:
                (decay if parameter.ndim >= 2 else plain).append(parameter)
        elif isinstance(module, nn.LayerNorm):
            plain.extend(own)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


subject = Subject(kind="parameter_groups", build=CaiT, forward=lambda m: groups(m))

WHAT = 'Line 42: parameters are collected from Linear and LayerNorm modules alone; the gains of LayerScale, which the blocks hold themselves, are in no group and are never trained.'
