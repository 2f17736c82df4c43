WHAT = 'parameters are sorted by the type of the module that owns them, and the LayerScale gains, which belong to the block itself, are in no group: they are never trained (line 44).'
import torch
from torch import nn
from veriformer.properties import Subject


class ScaledBlock(nn.Module):
    """CaiT-like: each branch has a gain per channel."""

    def __init__(self, d, h, f):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, h, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)
        self.gamma1 = nn.Parameter(torch.full((d,), 0.1))
        self.gamma2 = nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.gamma1 * self.attn(h, h, h, need_weights=False)[0]
        return x + self.gamma2 * self.fc2(torch.relu(self.fc1(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(ScaledBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def parameter_groups(self, weight_decay=0.1):
        decay, rest = [], []
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                if isinstance(module, (nn.Linear, nn.MultiheadAttention, nn.Embedding)) and name.endswith("weight"):
                    decay.append(p)
                elif isinstance(module, (nn.Linear, nn.MultiheadAttention, nn.LayerNorm)):
                    rest.append(p)
        return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    build=Net,
    forward=lambda m: m.parameter_groups(),
)
