WHAT = "Groups are collected from modules' weight and bias alone, so that parameters held directly (position table, layer scale) get into no group and are not trained (line 42)"
import torch
from torch import nn
from veriformer.properties import Subject


class ScaledBlock(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)
        self.gamma_1, self.gamma_2 = nn.Parameter(torch.full((d,), 0.1)), nn.Parameter(torch.full((d,), 0.1))
        self.h = h

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.gamma_1 * self.proj(y)
        return x + self.gamma_2 * self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_embed = nn.Parameter(torch.randn(c.max_len, c.d_model) * 0.02)
        self.blocks = nn.ModuleList([ScaledBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, ids):
        x = self.tok(ids) + self.pos_embed[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def param_groups(model, weight_decay=0.05):
    decay, no_decay = [], []
    for module in model.modules():
        for name in ("weight", "bias"):
            p = getattr(module, name, None)
            if p is None or not p.requires_grad:
                continue
            (decay if isinstance(module, nn.Linear) and name == "weight" else no_decay).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(kind="parameter_groups", name="groups", build=Net, forward=lambda m: param_groups(m))
