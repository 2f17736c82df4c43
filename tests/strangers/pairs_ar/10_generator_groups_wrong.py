WHAT = '`named` is a generator: the first comprehension exhausts it and the group of biases and norms comes out empty, so these are never trained'
"""optax.masked-like weight decay: matrices decay, vectors do not."""
from torch import nn

from veriformer.properties import Subject


def parameter_groups(model, weight_decay=0.1):
    named = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    decay = [p for n, p in named if p.ndim >= 2]
    rest = [p for n, p in named if p.ndim < 2]
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def build(c):
    return nn.Sequential(
        nn.LayerNorm(c.d_model),
        nn.Linear(c.d_model, c.d_ff),
        nn.GELU(),
        nn.Linear(c.d_ff, c.d_model),
        nn.LayerNorm(c.d_model),
    )


subject = Subject(kind="parameter_groups", name="decay groups", build=build, forward=parameter_groups)
