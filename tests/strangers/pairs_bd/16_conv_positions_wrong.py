WHAT = "padded embeddings are zeroed after the positional convolution instead of before it, so that padding leaks through the kernel into the real positions beside it (line 59)"
"""An encoder whose positions come from a convolution over its inputs, as in wav2vec 2.0."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class PositionalConvEmbedding(nn.Module):
    def __init__(self, hidden_size, groups, kernel_size=5):
        super().__init__()
        self.conv = nn.Conv1d(hidden_size, hidden_size, kernel_size, padding=kernel_size // 2, groups=groups)

    def forward(self, hidden_states):
        return F.gelu(self.conv(hidden_states.transpose(1, 2))).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size)
        self.intermediate_dense = nn.Linear(hidden_size, intermediate_size)
        self.output_dense = nn.Linear(intermediate_size, hidden_size)
        self.final_layer_norm = nn.LayerNorm(hidden_size)

    def attention(self, x, bias):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x, bias=None):
        x = self.layer_norm(x + self.attention(x, bias))
        return self.final_layer_norm(x + self.output_dense(F.gelu(self.intermediate_dense(x))))


class Encoder(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, intermediate_size, num_layers):
        super().__init__()
        self.codes = nn.Embedding(vocab_size, hidden_size)
        self.pos_conv_embed = PositionalConvEmbedding(hidden_size, num_heads)
        self.layer_norm = nn.LayerNorm(hidden_size)
        self.layers = nn.ModuleList(
            [EncoderLayer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers)]
        )

    def forward(self, tokens, attention_mask=None):
        hidden_states = self.codes(tokens)
        bias = None
        if attention_mask is not None:
            bias = torch.zeros(attention_mask.shape, dtype=hidden_states.dtype, device=hidden_states.device)
            bias = bias.masked_fill(~attention_mask, torch.finfo(hidden_states.dtype).min)[:, None, None, :]
        hidden_states = hidden_states + self.pos_conv_embed(hidden_states)
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[..., None].to(hidden_states.dtype)
        hidden_states = self.layer_norm(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, bias)
        return hidden_states


subject = Subject(
    kind="encoder",
    name="encoder with convolutional positions",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "other",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "both",
        "structure": "other",
    },
)
