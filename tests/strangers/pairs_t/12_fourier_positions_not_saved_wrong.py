WHAT = "the random matrix of the positions is a buffer that is not saved (persistent=False), so that a loaded checkpoint has other positions (line 20)"

"""An encoder with random Fourier features for positions, as SAM's image encoder and prompts have them."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RandomPositions(nn.Module):
    """[sin(2 pi g p), cos(2 pi g p)] for frequencies g that are drawn once and belong to the model."""

    def __init__(self, width, scale=0.1):
        super().__init__()
        if width % 2:
            raise ValueError("width has to be even: half sines, half cosines")
        matrix = scale * torch.randn(width // 2)
        self.register_buffer("gaussian", matrix, persistent=False)

    def forward(self, length):
        places = torch.arange(length, device=self.gaussian.device, dtype=self.gaussian.dtype)
        angles = 2 * torch.pi * places[:, None] * self.gaussian
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (D // self.heads) ** -0.5) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.lin1, self.lin2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, mask):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.lin2(F.gelu(self.lin1(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, vocab_size, width, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.positions = RandomPositions(width)
        self.blocks = nn.ModuleList([Block(width, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens)
        x = x + self.positions(tokens.shape[1]).to(x.dtype)
        mask = None if attention_mask is None else attention_mask.bool()
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="encoder with Fourier positions",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": False, "padding_side": "right"},
)
