"""A small GPT in Megatron's manner: [s, b, h], fused QKV, query-key layer scaling undone inside the softmax."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class FusedScaleMaskSoftmax(nn.Module):
    """softmax(scale * input), causal; a padding mask (True = masked out) comes on top where there is one."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, input, mask):
        if mask is None:
            return self.forward_upper_triang(input)
        return self.forward_masked(input, mask)

    @staticmethod
    def triangle(input):
        sq, sk = input.shape[-2:]
        return torch.ones(sq, sk, dtype=torch.bool, device=input.device).triu(1)

    def forward_upper_triang(self, input):
        input = input * self.scale
        return torch.softmax(input.masked_fill(self.triangle(input), float("-inf")), dim=-1)

    def forward_masked(self, input, mask):
        input = input * self.scale
        mask = mask | self.triangle(input)
        return torch.softmax(input.masked_fill(mask, torch.finfo(input.dtype).min), dim=-1)


class ParallelAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, layer_number):
        super().__init__()
        self.np = num_attention_heads
        self.hn = hidden_size // num_attention_heads
        coeff = max(1, layer_number)
        self.norm_factor = math.sqrt(self.hn) * coeff
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.scale_mask_softmax = FusedScaleMaskSoftmax(coeff)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask):
        sq, b, h = hidden_states.shape
        mixed = self.query_key_value(hidden_states).view(sq, b, self.np, 3 * self.hn)
        query, key, value = mixed.split(self.hn, dim=-1)
        query, key, value = (t.reshape(sq, b * self.np, self.hn) for t in (query, key, value))
        scores = torch.bmm(query.transpose(0, 1), key.permute(1, 2, 0)) * (1.0 / self.norm_factor)
        probs = self.scale_mask_softmax(scores.view(b, self.np, sq, sq), attention_mask)
        context = torch.bmm(probs.view(b * self.np, sq, sq), value.transpose(0, 1))
        return self.dense(context.transpose(0, 1).reshape(sq, b, h))


class ParallelMLP(nn.Module):
    def __init__(self, hidden_size, ffn_hidden_size):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden_size, ffn_hidden_size)
        self.dense_4h_to_h = nn.Linear(ffn_hidden_size, hidden_size)

    def forward(self, hidden_states):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden_states), approximate="tanh"))


class ParallelTransformerLayer(nn.Module):
    def __init__(self, hidden_size, heads, ffn_hidden_size, layer_number):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = ParallelAttention(hidden_size, heads, layer_number)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = ParallelMLP(hidden_size, ffn_hidden_size)

    def forward(self, hidden_states, attention_mask):
        hidden_states = hidden_states + self.self_attention(self.input_layernorm(hidden_states), attention_mask)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class GPTModel(nn.Module):
    def __init__(self, vocab_size, hidden_size, heads, num_layers, ffn_hidden_size, max_len):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_len, hidden_size)
        self.layers = nn.ModuleList(
            [ParallelTransformerLayer(hidden_size, heads, ffn_hidden_size, i + 1) for i in range(num_layers)]
        )
        self.final_layernorm = nn.LayerNorm(hidden_size)

    def forward(self, tokens, attention_mask=None):
        position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        hidden_states = (self.word_embeddings(tokens) + self.position_embeddings(position_ids)).transpose(0, 1)
        mask = None if attention_mask is None else ~attention_mask[:, None, None, :]
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask)
        hidden_states = self.final_layernorm(hidden_states).transpose(0, 1)
        return F.linear(hidden_states, self.word_embeddings.weight)


subject = Subject(
    kind="decoder",
    name="Megatron GPT",
    build=lambda c: GPTModel(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "attention_scale": "1/sqrt(d_head)",
        "tied": True,
        "output_bias": False,
        "padding_side": "right",
    },
)
