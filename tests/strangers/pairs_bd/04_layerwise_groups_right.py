"""Fine-tuning groups in the manner of BEiT: layer-wise learning rate decay, and no weight decay for vectors."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Backbone(nn.Module):
    def __init__(self, vocab, dim, heads, hidden, depth, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def layer_id(name, depth):
    if name.startswith("embed"):
        return 0
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1


def param_groups_lrd(model, weight_decay=0.05, layer_decay=0.75):
    depth = len(model.blocks)
    scales = [layer_decay ** (depth + 1 - i) for i in range(depth + 2)]
    groups = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if param.ndim == 1:
            kind, decay = "no_decay", 0.0
        else:
            kind, decay = "decay", weight_decay
        layer = layer_id(name, depth)
        key = f"layer_{layer}_{kind}"
        if key not in groups:
            groups[key] = {"params": [], "weight_decay": decay, "lr_scale": scales[layer]}
        groups[key]["params"].append(param)
    return list(groups.values())


subject = Subject(
    kind="parameter_groups",
    name="layer-wise groups",
    build=lambda c: Backbone(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.num_classes),
    forward=lambda model: param_groups_lrd(model),
)
