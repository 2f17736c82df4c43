WHAT = 'Which parameters decay is told by p.dim() >= 2 alone: the stacked biases of the experts, [experts, width], have two dimensions and are decayed like matrices (line 57).'
import torch
from torch import nn

from veriformer.properties import Subject


class Experts(nn.Module):
    def __init__(self, num_experts, d_model, d_ff):
        super().__init__()
        self.fc_weight = nn.Parameter(torch.randn(num_experts, d_model, d_ff) * 0.02)
        self.fc_bias = nn.Parameter(torch.zeros(num_experts, d_ff))
        self.proj_weight = nn.Parameter(torch.randn(num_experts, d_ff, d_model) * 0.02)
        self.proj_bias = nn.Parameter(torch.zeros(num_experts, d_model))

    def forward(self, x, gates):  # [N, D], [N, E]
        hidden = torch.einsum("nd,edf->enf", x, self.fc_weight) + self.fc_bias[:, None]
        out = torch.einsum("enf,efd->end", torch.relu(hidden), self.proj_weight) + self.proj_bias[:, None]
        return torch.einsum("ne,end->nd", gates, out)


class MoELayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.router = nn.Linear(d_model, 4)
        self.experts = Experts(4, d_model, d_ff)

    def forward(self, x):
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        h = self.ln_2(x).flatten(0, 1)
        return x + self.experts(h, self.router(h).softmax(-1)).view_as(x)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([MoELayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def configure_groups(model, weight_decay=0.1):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        is_matrix = p.dim() >= 2
        (decay if is_matrix else no_decay).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of a mixture of experts",
    build=Model,
    forward=lambda model: configure_groups(model),
)
