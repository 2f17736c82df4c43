"""Optimiser groups by name, in the way of fine-tuning scripts."""
from torch import nn

from veriformer.properties import Subject

NO_DECAY = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")


class Block(nn.Module):
    def __init__(self, d, d_ff):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_out = nn.Linear(d, d_ff), nn.Linear(d_ff, d)


class Backbone(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight


def groups(model, weight_decay=0.1):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    free = [p for n, p in named if n.endswith(NO_DECAY)]
    taken = {id(p) for p in free}
    return [
        {"params": [p for _, p in named if id(p) not in taken], "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


subject = Subject(
    kind="parameter_groups",
    name="groups by name",
    build=Backbone,
    forward=groups,
)
