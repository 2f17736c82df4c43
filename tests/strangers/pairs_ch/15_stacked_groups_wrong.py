"""AdamW groups for a stack whose layers share one tensor per parameter, [L, ...], so that they run as a scan."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Scanned(nn.Module):
    """Weights of all layers stacked along the first axis."""

    def __init__(self, depth, width, heads, inner):
        super().__init__()
        self.heads = heads

        def stacked(*shape):
            return nn.Parameter(torch.randn(depth, *shape) * shape[-1] ** -0.5)

        self.qkv_weight, self.qkv_bias = stacked(3 * width, width), nn.Parameter(torch.zeros(depth, 3 * width))
        self.out_weight, self.out_bias = stacked(width, width), nn.Parameter(torch.zeros(depth, width))
        self.up_weight, self.up_bias = stacked(inner, width), nn.Parameter(torch.zeros(depth, inner))
        self.down_weight, self.down_bias = stacked(width, inner), nn.Parameter(torch.zeros(depth, width))
        self.norm1_weight, self.norm1_bias = nn.Parameter(torch.ones(depth, width)), nn.Parameter(torch.zeros(depth, width))
        self.norm2_weight, self.norm2_bias = nn.Parameter(torch.ones(depth, width)), nn.Parameter(torch.zeros(depth, width))

    def forward(self, x):
        b, t, d = x.shape
        for i in range(self.qkv_weight.shape[0]):
            z = F.layer_norm(x, (d,), self.norm1_weight[i], self.norm1_bias[i])
            q, k, v = F.linear(z, self.qkv_weight[i], self.qkv_bias[i]).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
            x = x + F.linear(y, self.out_weight[i], self.out_bias[i])
            z = F.layer_norm(x, (d,), self.norm2_weight[i], self.norm2_bias[i])
            x = x + F.linear(F.gelu(F.linear(z, self.up_weight[i], self.up_bias[i])), self.down_weight[i], self.down_bias[i])
        return x


class Tower(nn.Module):
    def __init__(self, depth, width, heads, inner, classes):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.scan = Scanned(depth, width, heads, inner)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.norm(self.scan(self.stem(x))).mean(1))


def groups(model, weight_decay=0.1):
    """Matrices decay; biases and gains do not."""
    decay, rest = [], []
    for name, p in model.named_parameters():
        axes = p.dim()
        (decay if axes >= 2 else rest).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of a scanned stack",
    build=lambda c: Tower(c.num_layers, c.d_model, c.num_heads, c.d_ff, c.num_classes),
    forward=groups,
)

WHAT = 'The axis of layers is counted: stacked biases and norm gains [L, D] look like matrices and are decayed (line 53).'
