"""A small GPT and the two groups of parameters that AdamW is given: matrices decay, biases and norms do not."""

import torch.nn as nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, inner), "c_proj": nn.Linear(inner, width)})


class GPT(nn.Module):
    def __init__(self, vocab_size, max_len, width, inner, depth):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, width)
        self.wpe = nn.Embedding(max_len, width)
        self.h = nn.ModuleList([Block(width, inner) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)


def is_exempt(name):
    """Biases, and everything of a norm: ln_1, ln_2, ln_f."""
    return name.endswith(".bias") or name.split(".")[-2].startswith("ln_")


def parameter_groups(model, weight_decay=0.1):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decay = [p for n, p in named if not is_exempt(n)]
    exempt = [p for n, p in named if is_exempt(n)]
    assert len(decay) + len(exempt) == len(named)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]


subject = Subject(
    kind="parameter_groups",
    name="decay groups",
    build=lambda c: GPT(c.vocab_size, c.max_len, c.d_model, c.d_ff, c.num_layers),
    forward=lambda model: parameter_groups(model),
)
