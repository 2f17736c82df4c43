WHAT = "parameter groups are collected over modules' weight and bias names alone, so the bare parameters (class token, layer scale, time bias) are in no group and are never trained (`for name in ('weight', 'bias')`)"
import torch
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.layer_scale = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x):
        return x + self.layer_scale * self.fc2(self.fc1(self.norm(x)).relu())


class SessionRanker(nn.Module):
    def __init__(self, items, dim, hidden, depth):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.time_bias = nn.Parameter(torch.zeros(16, dim))
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def optimizer_groups(self, weight_decay=0.05):
        decay, plain = [], []
        for module in self.modules():
            for name in ("weight", "bias"):
                p = getattr(module, name, None)
                if p is None:
                    continue
                heavy = name == "weight" and isinstance(module, nn.Linear)
                (decay if heavy else plain).append(p)
        return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of a session ranker",
    build=lambda c: SessionRanker(c.vocab_size, c.d_model, c.d_ff, c.num_layers),
    forward=lambda m: m.optimizer_groups(),
)
