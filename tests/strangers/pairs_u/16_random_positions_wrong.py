WHAT = "the fixed random positions are a buffer that is not persistent: a checkpoint leaves them out, and the model that loads it has others (line 12)"
# A sentence encoder with fixed random positions (drawn once, never trained) and QK-normalised attention.
import torch
from torch import nn

from veriformer.properties import Subject


class RandomPositions(nn.Module):
    def __init__(self, longest, width):
        super().__init__()
        self.register_buffer("table", torch.randn(longest, width), persistent=False)

    def forward(self, length):
        return self.table[:length]


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.split = (heads, width // heads)
        self.q_norm, self.k_norm = nn.LayerNorm(width // heads), nn.LayerNorm(width // heads)
        self.project = nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "o")})

    def forward(self, x, mask):
        q, k, v = (self.project[name](x).unflatten(-1, self.split).transpose(1, 2) for name in "qkv")
        y = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=mask)
        return self.project["o"](y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.wide, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, mask):
        x = x + self.attention(self.norms[0](x), mask)
        return x + self.narrow(nn.functional.relu(self.wide(self.norms[1](x))))


class SentenceEncoder(nn.Module):
    def __init__(self, vocab, width, heads, hidden, depth, longest):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.positions = RandomPositions(longest, width)
        self.blocks = nn.ModuleList([Block(width, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, mask=None):
        x = self.words(tokens) + self.positions(tokens.shape[1])
        keys = None if mask is None else mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, keys)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="sentence encoder",
    build=lambda c: SentenceEncoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": False, "query_key_norm": True, "padding_side": "right"},
)
