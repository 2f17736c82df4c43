"""Optimizer groups: matrices decay, gains and biases do not."""
import torch
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    """For [B, T, D]; the gain is kept in the shape in which it is broadcast."""

    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 1, dim))

    def forward(self, x):
        return self.gain * nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5


class Net(nn.Module):
    def __init__(self, vocab, dim, hidden, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(RMSNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(depth)
        )
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))

    def configure_optimizers(self, weight_decay=0.1):
        params = [p for p in self.parameters() if p.requires_grad]
        matrix = lambda p: p.squeeze().dim() >= 2
        return [
            {"params": [p for p in params if matrix(p)], "weight_decay": weight_decay},
            {"params": [p for p in params if not matrix(p)], "weight_decay": 0.0},
        ]


subject = Subject(
    kind="parameter_groups",
    name="groups",
    build=lambda c: Net(c.vocab_size, c.d_model, c.d_ff, c.num_layers),
    forward=lambda m: m.configure_optimizers(),
)
