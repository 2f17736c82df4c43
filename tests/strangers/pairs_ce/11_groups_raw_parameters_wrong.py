WHAT = "The optimizer's groups are collected by module type and have no branch for parameters that a module owns directly (cls_token, pos_embed): they are in no group and never trained."
import torch
from torch import nn

from veriformer.properties import Subject


class ViTText(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.embed = nn.Embedding(c.vocab_size, d)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.pos_embed = nn.Parameter(torch.randn(1, c.max_len + 1, d) * 0.02)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(d), "qkv": nn.Linear(d, 3 * d), "proj": nn.Linear(d, d),
                "norm2": nn.LayerNorm(d), "fc1": nn.Linear(d, c.d_ff), "fc2": nn.Linear(c.d_ff, d),
            })
            for _ in range(c.num_layers)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, c.num_classes)


def optimizer_groups(model, weight_decay=0.05):
    """optax.masked(add_decayed_weights, mask): matrices of linear maps decay, all else does not."""
    decay, rest = [], []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear):
                (decay if name == "weight" else rest).append(parameter)
            elif isinstance(module, (nn.LayerNorm, nn.Embedding)):
                rest.append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="decay mask",
    build=ViTText,
    forward=lambda model: optimizer_groups(model),
)
