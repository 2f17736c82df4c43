import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


class SinkAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.sinks = nn.Parameter(torch.zeros(h))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        s = torch.cat((s, self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)), dim=-1).softmax(-1)[..., :-1]
        return self.proj((s @ v).transpose(1, 2).reshape(b, t, d))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.blocks = nn.ModuleList(SinkAttention(c.d_model, c.num_heads) for _ in range(c.num_layers))
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x))
        return self.head(x)


def configure(model, weight_decay=0.1):
    decay, no_decay = [], []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if name == "weight" and isinstance(module, nn.Linear):
                decay.append(p)
            else:
                no_decay.append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(kind="parameter_groups", build=Net, forward=lambda m: configure(m))
