import torch
from torch import Tensor, nn
from veriformer.properties import DrawnConfig, Subject


class RotaryTable:
    """cos and sin of position * frequency, grown when a longer sequence comes."""

    def __init__(self, width: int, rows: int = 16, base: float = 10000.0):
        self.frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        self.angles = torch.outer(torch.arange(rows, dtype=torch.float64), self.frequencies)

    def grow(self, length: int) -> None:
        rows = self.angles.shape[0]
        if length > rows:
            new = torch.arange(rows, length, dtype=torch.float64)
            self.angles = torch.cat((self.angles, torch.outer(new, self.frequencies)))

    def __call__(self, x: Tensor) -> Tensor:
        self.grow(x.shape[-2])
        angles = self.angles[: x.shape[-2]].to(x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, d_model: int, num_heads: int, table: RotaryTable):
        super().__init__()
        self.num_heads, self.table = num_heads, table
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        y = nn.functional.scaled_dot_product_attention(self.table(q), self.table(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int, table: RotaryTable):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = Attention(d_model, num_heads, table)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class RotaryLM(nn.Module):
    def __init__(self, vocab_size: int, d_model: int, num_heads: int, num_layers: int, d_ff: int):
        super().__init__()
        if (d_model // num_heads) % 2:
            raise ValueError("the width of a head must be even")
        self.table = RotaryTable(d_model // num_heads)
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.layers = nn.Sequential(*(Layer(d_model, num_heads, d_ff, self.table) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.tokens(tokens))))


subject = Subject(
    kind="decoder",
    name="rotary LM",
    build=lambda c: RotaryLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
    },
)
