WHAT = 'Groups are collected from known module types only, and the bare parameters cls_token and pos_embed (of the model itself) are in none: the optimizer never trains them.'
import torch
from torch import nn

from veriformer.properties import Subject


class TinyViT(nn.Module):
    def __init__(self, dim, heads, hidden, depth, classes):
        super().__init__()
        self.patch_embed = nn.Linear(48, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(nn.ModuleDict({
                "norm1": nn.LayerNorm(dim), "qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim),
                "norm2": nn.LayerNorm(dim), "fc1": nn.Linear(dim, hidden), "fc2": nn.Linear(hidden, dim),
            }))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)


def param_groups(model, weight_decay=0.05):
    decay, no_decay = [], []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear) and name == "weight":
                decay.append(p)
            elif isinstance(module, (nn.Linear, nn.LayerNorm)):
                no_decay.append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of a ViT",
    build=lambda c: TinyViT(c.d_model, c.num_heads, c.d_ff, c.num_layers, c.num_classes),
    forward=param_groups,
)
