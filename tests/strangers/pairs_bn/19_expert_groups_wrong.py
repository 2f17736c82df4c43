WHAT = 'what decays is decided by the number of axes alone: the biases of the stacked experts have three axes and are decayed, those of all other maps are not (line 59)'
"""Parameter groups for AdamW of a decoder whose experts are stacked in one tensor each."""

import torch
from torch import nn

from veriformer.properties import Subject


class StackedExperts(nn.Module):
    def __init__(self, num_experts, d_model, d_ff):
        super().__init__()
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.up_weight = nn.Parameter(torch.randn(num_experts, d_model, d_ff) * d_model**-0.5)
        self.up_bias = nn.Parameter(torch.zeros(num_experts, 1, d_ff))
        self.down_weight = nn.Parameter(torch.randn(num_experts, d_ff, d_model) * d_ff**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(num_experts, 1, d_model))

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        h = torch.relu(x[..., None, None, :] @ self.up_weight + self.up_bias)
        y = (h @ self.down_weight + self.down_bias).squeeze(-2)
        return (gates[..., None] * y).sum(-2)


class Layer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.experts = StackedExperts(3, d_model, d_ff)

    def forward(self, x, mask):
        h = self.norm_1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.experts(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        t = tokens.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def groups(model, weight_decay=0.1):
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            rest.append(parameter)
        else:
            decay.append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups with stacked experts",
    build=Model,
    forward=lambda model: groups(model),
    declares={},
)
