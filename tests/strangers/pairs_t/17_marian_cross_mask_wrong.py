WHAT = "the decoder is called without the mask of the source, so that cross-attention reads what the encoder gives at padding (line 101)"

"""An encoder-decoder for translation (Marian, BART): pre-norm, learned positions, GELU."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, memory, bias=None):
        B, T, D = x.shape
        q = self.q_proj(x).view(B, T, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(memory).view(B, -1, self.heads, self.dim).transpose(1, 2)
        v = self.v_proj(memory).view(B, -1, self.heads, self.dim).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) * self.dim**-0.5
        if bias is not None:
            scores = scores + bias
        return self.out_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, T, D))


def padding_bias(mask, dtype):
    """[B, S] of True = may attend to [B, 1, 1, S] of 0 and the lowest number."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(~mask.bool(), torch.finfo(dtype).min)[:, None, None, :]


def causal_bias(length, padding, dtype, device):
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    if padding is not None:
        allowed = allowed & padding.bool()[:, None, None, :]
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(~allowed, torch.finfo(dtype).min)


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.self_attn, self.ffn = Attention(c.d_model, c.num_heads), FeedForward(c.d_model, c.d_ff)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, bias):
        h = self.norm1(x)
        x = x + self.self_attn(h, h, bias)
        return x + self.ffn(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.self_attn, self.cross_attn = Attention(c.d_model, c.num_heads), Attention(c.d_model, c.num_heads)
        self.ffn = FeedForward(c.d_model, c.d_ff)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(c.d_model) for _ in range(3))

    def forward(self, x, memory, bias, memory_bias=None):
        h = self.norm1(x)
        x = x + self.self_attn(h, h, bias)
        x = x + self.cross_attn(self.norm2(x), memory, memory_bias)
        return x + self.ffn(self.norm3(x))


class Translator(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.source_positions = nn.Embedding(c.max_len, c.d_model)
        self.target_positions = nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList([EncoderLayer(c) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(c) for _ in range(c.num_layers)])
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, source, target, source_mask=None, target_mask=None):
        dtype = self.shared.weight.dtype
        source_bias = padding_bias(source_mask, dtype)
        x = self.shared(source) + self.source_positions.weight[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x, source_bias)
        memory = self.encoder_norm(x)
        y = self.shared(target) + self.target_positions.weight[: target.shape[1]]
        bias = causal_bias(target.shape[1], target_mask, dtype, target.device)
        for layer in self.decoder:
            y = layer(y, memory, bias)
        return self.lm_head(self.decoder_norm(y))


subject = Subject(
    kind="encoder_decoder",
    name="translator",
    build=Translator,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": False,
        "padding_side": "right",
        "encodes_source": True,
    },
)
