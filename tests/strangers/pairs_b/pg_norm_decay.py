"""minGPT's parameter groups: matrices of linear layers decay; biases, norms and embeddings do not."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn, self.proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)


def groups_by_type(model):
    decay, rest = [], []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            (decay if isinstance(module, nn.Linear) and name == "weight" else rest).append(p)
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def groups_by_name(model):
    decay, rest = [], []
    for name, p in model.named_parameters():
        exempt = any(key in name for key in ("bias", "LayerNorm.weight", "wte", "wpe"))
        (rest if exempt else decay).append(p)
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


right = Subject(kind="parameter_groups", build=GPT, forward=groups_by_type)
wrong = Subject(kind="parameter_groups", build=GPT, forward=groups_by_name)
WHAT = "The norms are looked for under the name 'LayerNorm.weight' (from BERT), but are called ln_1, ln_2 and ln_f here, so that the gains of all norms get weight decay."
PLACE = "parameter groups (gains of the norms)"
