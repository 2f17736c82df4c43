"""GPT of Megatron, [s, b, h] inside, with query-key layer scaling: scores are made in half precision, so they are
divided by the number of the layer before they are summed, and multiplied by it again in the softmax, in float32."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ScaleMaskSoftmax(nn.Module):
    """Masks, scales and normalises, in float32 at least; was part of the attention before the kernels were fused."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(self, scores, mask):
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.scale
        return wide.masked_fill(mask, float("-inf")).softmax(dim=-1).to(scores.dtype)


class CoreAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, layer_number):
        super().__init__()
        self.np, self.hn = num_heads, hidden_size // num_heads
        coeff = float(max(1, layer_number))
        self.norm_factor = math.sqrt(self.hn) * coeff
        self.scale_mask_softmax = ScaleMaskSoftmax(scale=coeff)

    def forward(self, query, key, value):  # each [s, b, np, hn]
        sq, b, np_, hn = query.shape
        query = query.reshape(sq, b * np_, hn).transpose(0, 1)
        key = key.reshape(sq, b * np_, hn).transpose(0, 1)
        value = value.reshape(sq, b * np_, hn).transpose(0, 1)
        scores = torch.bmm(query / self.norm_factor, key.transpose(1, 2))
        mask = torch.ones(sq, sq, dtype=torch.bool, device=query.device).triu(1)
        probs = self.scale_mask_softmax(scores.view(b, np_, sq, sq), mask).view(b * np_, sq, sq)
        return torch.bmm(probs, value).transpose(0, 1).reshape(sq, b, np_ * hn)


class ParallelTransformerLayer(nn.Module):
    def __init__(self, c, layer_number):
        super().__init__()
        self.np = c.num_heads
        self.input_layernorm = nn.LayerNorm(c.d_model)
        self.query_key_value = nn.Linear(c.d_model, 3 * c.d_model)
        self.core_attention = CoreAttention(c.d_model, c.num_heads, layer_number)
        self.dense = nn.Linear(c.d_model, c.d_model)
        self.post_attention_layernorm = nn.LayerNorm(c.d_model)
        self.dense_h_to_4h = nn.Linear(c.d_model, c.d_ff)
        self.dense_4h_to_h = nn.Linear(c.d_ff, c.d_model)

    def forward(self, hidden):
        mixed = self.query_key_value(self.input_layernorm(hidden))
        mixed = mixed.view(*mixed.shape[:-1], self.np, -1)  # [s, b, np, 3 hn]
        hidden = hidden + self.dense(self.core_attention(*mixed.chunk(3, dim=-1)))
        inner = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden)), approximate="tanh")
        return hidden + self.dense_4h_to_h(inner)


class GPTModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(ParallelTransformerLayer(c, i + 1) for i in range(c.num_layers))
        self.final_layernorm = nn.LayerNorm(c.d_model)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = (self.word_embeddings(tokens) + self.position_embeddings(positions)).transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.linear(self.final_layernorm(hidden).transpose(0, 1), self.word_embeddings.weight)


subject = Subject(
    kind="decoder",
    name="Megatron GPT",
    build=GPTModel,
    forward=lambda model, tokens: model(tokens),
    declares={
        "causal": True,
        "positions": "learned",
        "attention_scale": "1/sqrt(d_head)",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
    },
)
