WHAT = "only modules without children are gone through, so that the sinks, which SinkAttention holds itself beside its linear maps, are in no group and never trained (line 50)"
"""Parameter groups of a GPT with attention sinks and learned positions: matrices decay, the rest does not."""
import torch
from torch import nn

from veriformer.properties import Subject


class SinkAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.sinks = nn.Parameter(torch.zeros(h))  # one logit a head that takes weight and gives nothing

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / (d // self.h) ** 0.5
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        s = torch.cat((s, self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)), dim=-1)
        return self.out((s.softmax(-1)[..., :-1] @ v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(d), SinkAttention(d, h), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))

    def forward(self, x):
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, d, h, layers, f, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.Sequential(*[Block(d, h, f) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.size(1)))
        return self.head(self.norm(self.blocks(x)))

    def optim_groups(self, weight_decay=0.1):
        decay, keep = [], []
        for module in self.modules():
            if any(True for _ in module.children()):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                matrix = isinstance(module, nn.Linear) and name == "weight"
                (decay if matrix else keep).append(parameter)
        return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="optim groups",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m: m.optim_groups(),
)
