"""Weight decay for matrices alone: what each module owns is sorted by its type (minGPT's way), for a ViT."""
import torch
from torch import nn
from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)
        self.gamma1, self.gamma2 = nn.Parameter(1e-4 * torch.ones(d)), nn.Parameter(1e-4 * torch.ones(d))


class ViT(nn.Module):
    def __init__(self, d, f, depth, max_len, classes):
        super().__init__()
        self.patch = nn.Linear(3 * 16 * 16, d)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.pos_embed = nn.Parameter(torch.randn(1, max_len + 1, d) * 0.02)
        self.blocks = nn.ModuleList([Block(d, f) for _ in range(depth)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)


def groups(model, weight_decay=0.05):
    decay, keep = [], []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear) and name == "weight":
                decay.append(p)
            else:  # biases, norms, tokens, positions, scales
                keep.append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    build=lambda c: ViT(c.d_model, c.d_ff, c.num_layers, c.max_len, c.num_classes),
    forward=lambda m: groups(m),
)
