"""Speech encoder with a convolution for positions (wav2vec 2.0), behind its feature extractor."""

import torch
from torch import nn

from veriformer.properties import Subject


class PositionalConvEmbedding(nn.Module):
    def __init__(self, hidden_size, groups, kernel=3):
        super().__init__()
        self.conv = nn.Conv1d(hidden_size, hidden_size, kernel, padding=kernel // 2, groups=groups)
        self.activation = nn.GELU()

    def forward(self, hidden_states):
        return self.activation(self.conv(hidden_states.transpose(1, 2))).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self, hidden_size, heads, intermediate_size):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.v_proj, self.out_proj = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size)
        self.intermediate_dense = nn.Linear(hidden_size, intermediate_size)
        self.output_dense = nn.Linear(intermediate_size, hidden_size)
        self.final_layer_norm = nn.LayerNorm(hidden_size)

    def attend(self, x, bias):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if bias is not None:
            scores = scores + bias
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, bias=None):
        x = self.layer_norm(x + self.attend(x, bias))
        feed = self.output_dense(nn.functional.gelu(self.intermediate_dense(x)))
        return self.final_layer_norm(x + feed)


class SpeechEncoder(nn.Module):
    def __init__(self, hidden_size, heads, layers, intermediate_size):
        super().__init__()
        self.pos_conv_embed = PositionalConvEmbedding(hidden_size, groups=heads)
        self.layer_norm = nn.LayerNorm(hidden_size)
        self.layers = nn.ModuleList([EncoderLayer(hidden_size, heads, intermediate_size) for _ in range(layers)])

    def forward(self, hidden_states, attention_mask=None):
        bias = None
        if attention_mask is not None:
            # what is padded must be silent
            hidden_states = hidden_states.masked_fill(~attention_mask[..., None], 0.0)
            bias = torch.zeros(attention_mask.shape, dtype=hidden_states.dtype, device=hidden_states.device)
            bias = bias.masked_fill(~attention_mask, torch.finfo(bias.dtype).min)[:, None, None, :]
        position_embeddings = self.pos_conv_embed(hidden_states)
        hidden_states = self.layer_norm(hidden_states + position_embeddings)
        for layer in self.layers:
            hidden_states = layer(hidden_states, bias)
        return hidden_states


subject = Subject(
    kind="encoder",
    name="speech encoder",
    build=lambda c: SpeechEncoder(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    inputs="embeddings",
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "other",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "both",
    },
)
