"""An encoder that keeps all hidden states and returns the last of them, normalised."""
from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject


@dataclass
class EncoderOutput:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]


class EncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.d_model)
        self.self_attn = nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True)
        self.layer_norm2 = nn.LayerNorm(config.d_model)
        self.mlp = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff), nn.ReLU(), nn.Linear(config.d_ff, config.d_model)
        )

    def forward(self, hidden_states, key_padding_mask=None):
        residual = hidden_states
        hidden_states = self.layer_norm1(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states, hidden_states, hidden_states, key_padding_mask=key_padding_mask, need_weights=False
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(self.layer_norm2(hidden_states))
        return residual + hidden_states


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.max_len, config.d_model)
        self.layers = nn.ModuleList([EncoderLayer(config) for _ in range(config.num_layers)])
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.register_buffer("position_ids", torch.arange(config.max_len)[None], persistent=False)

    def forward(self, input_ids, attention_mask=None):
        length = input_ids.shape[1]
        hidden_states = self.token_embedding(input_ids) + self.position_embedding(self.position_ids[:, :length])
        hidden = None if attention_mask is None else ~attention_mask
        encoder_states = ()
        for layer in self.layers:
            hidden_states = layer(hidden_states, hidden)
            encoder_states = encoder_states + (hidden_states,)
        return EncoderOutput(self.final_layer_norm(encoder_states[-1]), encoder_states)


subject = Subject(
    kind="encoder",
    name="hidden states",
    build=lambda c: Encoder(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask).last_hidden_state,
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "padding_side": "right",
    },
)
