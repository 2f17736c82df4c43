WHAT = "Parameters that belong to none of the listed module types (cls_token, pos_embed, LayerScale's gamma) fall through the isinstance chain into no group (line 62), so the optimizer never trains them."
import torch
from torch import nn

from veriformer.properties import Subject


class LayerScale(nn.Module):
    def __init__(self, dim, value=1e-2):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ls1, self.ls2 = LayerScale(dim), LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.heads = heads

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.ls1(self.proj(a.transpose(1, 2).flatten(2)))
        return x + self.ls2(self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)))))


class DeiT(nn.Module):
    def __init__(self, c, patch=4, grid=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, c.d_model, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.d_model) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, grid * grid + 1, c.d_model) * 0.02)
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(x.size(0), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def param_groups(model, weight_decay=0.05):
    """Matrices of linear maps and convolutions decay; biases, norms, scales, tokens and positions do not."""
    decay, no_decay = [], []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if isinstance(module, (nn.Linear, nn.Conv2d)) and name == "weight":
                decay.append(parameter)
            elif isinstance(module, (nn.Linear, nn.Conv2d, nn.LayerNorm)):
                no_decay.append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="DeiT parameter groups",
    build=DeiT,
    forward=lambda m: param_groups(m),
)
