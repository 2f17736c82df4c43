WHAT = "parameters that are no weight or bias of a submodule (LayerScale's gammas, the logit scale) are in no group and so never trained (line 50)"
"""Parameter groups (minGPT style) of a projector from image features, with LayerScale and CLIP's temperature."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc, self.out = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.gamma_1 = nn.Parameter(0.1 * torch.ones(dim))
        self.gamma_2 = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D)
        x = x + self.gamma_1 * self.proj(a)
        return x + self.gamma_2 * self.out(F.gelu(self.fc(self.ln_2(x))))


class Adapter(nn.Module):
    def __init__(self, dim, heads, layers, hidden):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        for block in self.blocks:
            image = block(image)
        image = F.normalize(self.head(self.ln_f(image).mean(1)), dim=-1)
        return self.logit_scale.exp() * image @ F.normalize(text, dim=-1).T

    def optim_groups(self, weight_decay):
        decay, no_decay = [], []
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                if name == "weight" and isinstance(module, nn.Linear):
                    decay.append(p)
                elif name in ("weight", "bias"):  # biases, gains of norms
                    no_decay.append(p)
        return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="adapter groups",
    build=lambda c: Adapter(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m: m.optim_groups(0.1),
)
