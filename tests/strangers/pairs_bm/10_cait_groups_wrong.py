WHAT = "param_groups goes by the type of the module and has no branch for LayerScale (`elif isinstance(module, nn.LayerNorm)`): its gammas are in no group and stay at 1e-4 for ever"
"""Optimizer groups of a CaiT-like vision Transformer with LayerScale: matrices decay, all else does not."""
import torch
from torch import nn

from veriformer.properties import Subject


class LayerScale(nn.Module):
    def __init__(self, dim, init=1e-4):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ls1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.ls2 = LayerScale(dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.ls1(self.proj(y.transpose(1, 2).reshape(B, N, C)))
        return x + self.ls2(self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)))))


class CaiT(nn.Module):
    def __init__(self, dim, heads, depth, hidden, classes):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(*[Block(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def param_groups(model, weight_decay=0.05):
    decay, no_decay = [], []
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                (decay if name == "weight" else no_decay).append(param)
            elif isinstance(module, nn.LayerNorm):
                no_decay.append(param)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="cait groups",
    build=lambda c: CaiT(c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
    forward=lambda m: param_groups(m),
)
