"""Parameter groups of a small tied GPT: matrices decay, biases, gains and embeddings do not, with a learning rate per depth.

Unusual: groups are made per layer (layer-wise learning rates), so there are many; the tied embedding appears once, among what is
not decayed. Parameters are sorted into groups by the type of their module (minGPT), not by their number of dimensions.
"""

import torch
from torch import nn

from veriformer.properties import Subject

DECAY = 0.1
BASE_RATE, RATE_PER_LAYER = 1e-3, 0.8


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = nn.ModuleDict({n: nn.Linear(c.d_model, c.d_model) for n in ("q", "k", "v", "o")})
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def depth_of(self, name):
        if name.startswith("h."):
            return int(name.split(".")[1]) + 1
        return 0 if name.startswith("w") else len(self.h) + 1

    def groups(self):
        spared = {
            id(p)
            for module in self.modules()
            if isinstance(module, (nn.LayerNorm, nn.Embedding))
            for p in module.parameters(recurse=False)
        }
        sorted_out = {}
        for name, p in self.named_parameters():  # a shared parameter comes once, under its first name
            if not p.requires_grad:
                continue
            decays = id(p) not in spared and not name.endswith("bias")
            sorted_out.setdefault((self.depth_of(name), decays), []).append(p)
        top = len(self.h) + 1
        return [
            {
                "params": params,
                "weight_decay": DECAY if decays else 0.0,
                "lr": BASE_RATE * RATE_PER_LAYER ** (top - depth),
            }
            for (depth, decays), params in sorted(sorted_out.items())
        ]


def forward(m):
    groups = m.groups()
    torch.optim.AdamW(groups)  # would complain about a parameter in two groups
    return [{k: (list(v) if k == "params" else v) for k, v in group.items()} for group in groups]


COMMON = dict(kind="parameter_groups", build=GPT, forward=forward)
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"tied": True})
