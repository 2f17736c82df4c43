WHAT = 'The walk over modules knows nn.Linear and nn.LayerNorm alone (line 34, where all the rest should be taken): parameters that a block holds itself, its LayerScale gains, land in no group and are never trained.'
# CaiT's blocks with LayerScale, and the parameter groups of AdamW in minGPT's manner.
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, init=1e-1):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.gamma_1 = nn.Parameter(init * torch.ones(dim))
        self.gamma_2 = nn.Parameter(init * torch.ones(dim))

    def forward(self, x):
        B, N, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D)
        x = x + self.gamma_1 * self.proj(h)
        return x + self.gamma_2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))


def configure_groups(model, weight_decay=0.05):
    decayed, plain = [], []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear):
                (decayed if name == "weight" else plain).append(parameter)
            elif isinstance(module, nn.LayerNorm):
                plain.append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of CaiT",
    build=lambda c: nn.Sequential(*[Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)]),
    forward=lambda m: configure_groups(m),
    declares={},
)
