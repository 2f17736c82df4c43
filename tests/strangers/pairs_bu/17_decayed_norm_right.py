import torch
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.fc, self.proj = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        T = x.shape[1]
        h = self.norm_1(x)
        x = x + self.attn(h, h, h, attn_mask=torch.ones(T, T, dtype=torch.bool).triu(1), need_weights=False)[0]
        return x + self.proj(torch.relu(self.fc(self.norm_2(x))))


class LM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


NO_DECAY = ("bias", "norm", "ln_f")


def groups(model, weight_decay=0.1):
    decay, plain = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if any(part in name for part in NO_DECAY) else decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


subject = Subject(kind="parameter_groups", build=LM, forward=lambda m: groups(m))
