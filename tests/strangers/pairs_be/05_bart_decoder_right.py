"""A small BART with pre-norm layers (mBART), in the manner of its modelling file."""

import torch
from torch import nn

from veriformer.properties import Subject


class BartAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor):
        return tensor.view(tensor.shape[0], tensor.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states, key_value_states, visible):
        query = self._shape(self.q_proj(hidden_states) * self.scaling)
        key = self._shape(self.k_proj(key_value_states))
        value = self._shape(self.v_proj(key_value_states))
        attn = query @ key.transpose(2, 3)
        attn = attn.masked_fill(~visible, torch.finfo(attn.dtype).min).softmax(dim=-1)
        return self.out_proj((attn @ value).transpose(1, 2).flatten(2))


class BartEncoderLayer(nn.Module):
    def __init__(self, d_model, heads, ffn_dim):
        super().__init__()
        self.self_attn = BartAttention(d_model, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1, self.fc2 = nn.Linear(d_model, ffn_dim), nn.Linear(ffn_dim, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def forward(self, hidden_states, visible):
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = self.self_attn(hidden_states, hidden_states, visible)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.fc2(torch.relu(self.fc1(hidden_states)))
        return residual + hidden_states


class BartDecoderLayer(nn.Module):
    def __init__(self, d_model, heads, ffn_dim):
        super().__init__()
        self.self_attn = BartAttention(d_model, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.encoder_attn = BartAttention(d_model, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1, self.fc2 = nn.Linear(d_model, ffn_dim), nn.Linear(ffn_dim, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def forward(self, hidden_states, encoder_hidden_states, visible, encoder_visible):
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = self.self_attn(hidden_states, hidden_states, visible)
        hidden_states = residual + hidden_states

        # Cross-Attention Block
        residual = hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)
        hidden_states = self.encoder_attn(hidden_states, encoder_hidden_states, encoder_visible)
        hidden_states = residual + hidden_states

        # Fully Connected
        residual = hidden_states
        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.fc2(torch.relu(self.fc1(hidden_states)))
        return residual + hidden_states


class Bart(nn.Module):
    def __init__(self, vocab_size, d_model, heads, layers, ffn_dim, max_len):
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder_positions = nn.Embedding(max_len, d_model)
        self.decoder_positions = nn.Embedding(max_len, d_model)
        self.encoder_layers = nn.ModuleList([BartEncoderLayer(d_model, heads, ffn_dim) for _ in range(layers)])
        self.decoder_layers = nn.ModuleList([BartDecoderLayer(d_model, heads, ffn_dim) for _ in range(layers)])
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.lm_head.weight = self.shared.weight

    def encode(self, source, source_mask):
        hidden_states = self.shared(source) + self.encoder_positions.weight[: source.shape[1]]
        for layer in self.encoder_layers:
            hidden_states = layer(hidden_states, source_mask)
        return self.encoder_norm(hidden_states)

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is None:
            source_mask = torch.ones_like(source, dtype=torch.bool)
        source_mask = source_mask[:, None, None, :]
        length = target.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            visible = visible & target_mask[:, None, None, :]
        memory = self.encode(source, source_mask)
        hidden_states = self.shared(target) + self.decoder_positions.weight[:length]
        for layer in self.decoder_layers:
            hidden_states = layer(hidden_states, memory, visible, source_mask)
        return self.lm_head(self.decoder_norm(hidden_states))


subject = Subject(
    kind="encoder_decoder",
    name="small bart",
    build=lambda c: Bart(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "tied": True,
        "padding_side": "right",
    },
)
