WHAT = "activation checkpointing does not restore the random state: the backward recomputes a block with other dropout masks than the forward had (line 61)"
# A causal ALiBi decoder whose blocks are checkpointed while it trains.
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


def slopes(heads):
    """Press et al.: 2^(-8 i / h), two interleaved series where h is no power of two."""
    power = 1 << (heads.bit_length() - 1)
    values = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(values + extra, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self, width, heads, hidden, dropout):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_m = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, bias):
        batch, length, width = x.shape
        fused = self.query_key_value(self.ln_a(x)).view(batch, length, self.heads, 3, -1)
        q, k, v = fused.permute(3, 0, 2, 1, 4).unbind(0)
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * q.size(-1) ** -0.5 + bias, dim=-1)
        context = torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop(self.dense(context))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.ln_m(x)))))


class Bloomlet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.words = nn.Embedding(c.vocab_size, c.d_model)
        self.words_norm = nn.LayerNorm(c.d_model)
        self.blocks = nn.ModuleList(
            [Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)]
        )
        self.final = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def bias(self, x):
        step = torch.arange(x.size(1), device=x.device)
        distance = (step[:, None] - step[None, :]).double()
        bias = -slopes(self.heads).to(x.device)[:, None, None] * distance
        return bias.masked_fill(distance < 0, float("-inf")).to(x.dtype)

    def forward(self, tokens):
        x = self.words_norm(self.words(tokens))
        bias = self.bias(x)
        for block in self.blocks:
            if self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, bias, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, bias)
        return self.head(self.final(x))


subject = Subject(
    kind="decoder",
    name="Bloomlet",
    build=Bloomlet,
    forward=lambda model, tokens: model(tokens),
    declares={"positions": "alibi", "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
)
