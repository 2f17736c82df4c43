"""Weight decay for a vision block with LayerScale: matrices decay, everything of one dimension does not."""
import torch
from torch import nn

from veriformer.properties import Subject


class ScaledBlock(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gamma1, self.gamma2 = nn.Parameter(torch.full((dim,), 1e-4)), nn.Parameter(torch.full((dim,), 1e-4))
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)


def build(c):
    blocks = [ScaledBlock(c.d_model, c.d_ff) for _ in range(c.num_layers)]
    return nn.Sequential(*blocks, nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes))


def param_groups(model, decay=0.05):
    yes, no = [], []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            if isinstance(module, nn.Linear) and name == "weight":
                yes.append(p)
            elif name == "bias" or isinstance(module, nn.LayerNorm):
                no.append(p)
    return [{"params": yes, "weight_decay": decay}, {"params": no, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of a scaled block",
    build=build,
    forward=lambda m: param_groups(m),
)

WHAT = 'The second group takes biases and what is in a LayerNorm (line 30): the LayerScale vectors, bare parameters of the block, are in no group and never trained.'
