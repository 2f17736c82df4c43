import torch
from torch import nn

from veriformer.properties import Subject


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(y.transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.prenorm_attn = PreNorm(dim, Attention(dim, heads))
        self.prenorm_mlp = PreNorm(dim, nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)))

    def forward(self, x):
        x = x + self.prenorm_attn(x)
        return x + self.prenorm_mlp(x)


class Transformer(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.to_logits(self.norm(x))


def is_exempt(name):
    """Biases and norms do not decay."""
    *owners, leaf = name.split(".")
    return leaf == "bias" or owners[-1] == "norm"


def optimizer_groups(model, weight_decay=0.1):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if not is_exempt(n)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if is_exempt(n)], "weight_decay": 0.0},
    ]


subject = Subject(
    kind="parameter_groups",
    name="groups by name",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m: optimizer_groups(m),
)
