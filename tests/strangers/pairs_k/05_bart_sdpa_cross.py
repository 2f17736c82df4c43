"""A small BART after the move to one shared SDPA function."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The decoder's cross-attention inherits is_causal=True from its class, so without a source mask it is causal over the source."
CAUSE = (
    "Cross-attention is causal: with no source mask given, target position t sees the memory's positions 0..t alone, "
    "later ones change nothing there."
)


def sdpa_attention_forward(module, query, key, value, attention_mask):
    is_causal = attention_mask is None and query.shape[2] > 1 and module.is_causal
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, is_causal=is_causal)
    return out.transpose(1, 2).flatten(2)


class BartAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, is_causal=False):
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, hidden_states, key_value_states=None, attention_mask=None):
        current = hidden_states if key_value_states is None else key_value_states
        split = lambda t: t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.q_proj(hidden_states)), split(self.k_proj(current)), split(self.v_proj(current))
        return self.out_proj(sdpa_attention_forward(self, q, k, v, attention_mask))


class BartEncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = BartAttention(config.d_model, config.num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1, self.fc2 = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x, attention_mask):
        x = self.self_attn_layer_norm(x + self.self_attn(x, attention_mask=attention_mask))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


def make(**cross_arguments):
    class BartDecoderLayer(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.self_attn = BartAttention(config.d_model, config.num_heads, is_causal=True)
            self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
            self.encoder_attn = BartAttention(config.d_model, config.num_heads, **cross_arguments)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
            self.fc1, self.fc2 = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)
            self.final_layer_norm = nn.LayerNorm(config.d_model)

        def forward(self, x, memory, attention_mask, memory_mask):
            x = self.self_attn_layer_norm(x + self.self_attn(x, attention_mask=attention_mask))
            x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, memory_mask))
            return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))

    class BartModel(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
            self.encoder_positions = nn.Embedding(config.max_len, config.d_model)
            self.decoder_positions = nn.Embedding(config.max_len, config.d_model)
            self.encoder_layers = nn.ModuleList([BartEncoderLayer(config) for _ in range(config.num_layers)])
            self.decoder_layers = nn.ModuleList([BartDecoderLayer(config) for _ in range(config.num_layers)])
            self.encoder_norm, self.decoder_norm = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)

        def forward(self, input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None):
            lowest = torch.finfo(self.shared.weight.dtype).min
            memory_mask = self_mask = None
            if attention_mask is not None:
                memory_mask = torch.zeros(attention_mask.shape, dtype=self.shared.weight.dtype, device=input_ids.device)
                memory_mask = memory_mask.masked_fill(~attention_mask.bool(), lowest)[:, None, None, :]
            if decoder_attention_mask is not None:
                length = decoder_input_ids.shape[1]
                seen = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
                seen = seen & decoder_attention_mask.bool()[:, None, None, :]
                self_mask = torch.zeros(seen.shape, dtype=self.shared.weight.dtype, device=input_ids.device)
                self_mask = self_mask.masked_fill(~seen, lowest)
            memory = self.shared(input_ids) + self.encoder_positions.weight[: input_ids.shape[1]]
            memory = self.encoder_norm(memory)
            for layer in self.encoder_layers:
                memory = layer(memory, memory_mask)
            x = self.shared(decoder_input_ids) + self.decoder_positions.weight[: decoder_input_ids.shape[1]]
            x = self.decoder_norm(x)
            for layer in self.decoder_layers:
                x = layer(x, memory, self_mask, memory_mask)
            return x

    return BartModel


def subject(**cross_arguments):
    return Subject(
        kind="encoder_decoder",
        name="small BART",
        build=make(**cross_arguments),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
    )


right = subject()
wrong = subject(is_causal=True)
