"""A GPT of the speedruns: RMS norms without gains, normalised queries and keys, squared ReLU, a loss in chunks."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError("the head's width must be even")
        self.dim, self.base = dim, base

    def forward(self, x):
        """x [B, T, H, K]."""
        inv_freq = (1 / self.base) ** (torch.arange(0, self.dim, 2, device=x.device, dtype=x.dtype) / self.dim)
        theta = torch.outer(torch.arange(x.size(1), device=x.device, dtype=x.dtype), inv_freq)[None, :, None, :]
        x1, x2 = x.chunk(2, dim=-1)
        cos, sin = theta.cos(), theta.sin()
        return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.rotary = Rotary(dim // num_heads)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3 * self.num_heads, -1).chunk(3, dim=-2)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc = nn.Linear(dim, hidden, bias=False)
        self.proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.proj(F.relu(self.fc(x)).square())


class GPT(nn.Module):
    loss_chunks = 4  # logits of a quarter of the sequence at a time

    def __init__(self, vocab_size, dim, num_heads, num_layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.attn = nn.ModuleList(Attention(dim, num_heads) for _ in range(num_layers))
        self.mlp = nn.ModuleList(MLP(dim, hidden) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def hidden(self, tokens):
        x = self.embed(tokens)
        for attn, mlp in zip(self.attn, self.mlp):
            x = x + attn(norm(x))
            x = x + mlp(norm(x))
        return norm(x)

    def loss(self, tokens, labels):
        hidden = self.hidden(tokens)
        total = hidden.new_zeros(())
        for states, wanted in zip(hidden.chunk(self.loss_chunks, dim=1), labels.chunk(self.loss_chunks, dim=1)):
            logits = self.head(states)
            total = total + F.cross_entropy(
                logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"
            )
        return total / (labels != -100).sum().clamp(min=1)

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


subject = Subject(
    kind="decoder",
    name="speedrun GPT",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    loss=lambda m, tokens, labels: m.loss(tokens, labels),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "query_key_norm": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "other",
        "bias": False,
        "output_bias": False,
        "shifts_labels": False,
        "ignore_index": -100,
        "empty_loss": "zero",
    },
)
