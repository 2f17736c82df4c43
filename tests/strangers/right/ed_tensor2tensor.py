"""tensor2tensor style: attention biases of -1e9, a timing signal with its cosines behind its sines, layer_preprocess functions.

Unusual: the timing signal is computed on the fly and spreads its wavelengths over half - 1 steps; queries, keys and values have
no biases (as in T2T's common_attention) while the feed-forward has; padding is set to zero behind the embedding. A sample
whose source is all padding attends evenly to zeros.
"""

import math

import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject


def get_timing_signal_1d(length, channels, like, min_timescale=1.0, max_timescale=1.0e4):
    position = torch.arange(length, dtype=torch.float64, device=like.device)
    num_timescales = channels // 2
    log_timescale_increment = math.log(max_timescale / min_timescale) / max(num_timescales - 1, 1)
    steps = torch.arange(num_timescales, dtype=torch.float64, device=like.device)
    inv_timescales = min_timescale * torch.exp(steps * -log_timescale_increment)
    scaled_time = position[:, None] * inv_timescales[None, :]
    signal = torch.cat([torch.sin(scaled_time), torch.cos(scaled_time)], dim=1)
    return F.pad(signal, (0, channels % 2)).to(like.dtype)


def large_negative(dtype):
    return max(-1e9, torch.finfo(dtype).min / 2)  # -1e9 but for float16, which does not reach that far


def attention_bias_ignore_padding(memory_padding):
    """memory_padding: float, 1 at padding. Returns [batch, 1, 1, memory_length]."""
    return (memory_padding * large_negative(memory_padding.dtype))[:, None, None, :]


def attention_bias_lower_triangle(length, like):
    band = torch.ones(length, length, dtype=like.dtype, device=like.device).tril()
    return (large_negative(like.dtype) * (1.0 - band))[None, None]


def split_heads(x, num_heads):
    return x.unflatten(-1, (num_heads, x.size(-1) // num_heads)).permute(0, 2, 1, 3)


def combine_heads(x):
    return x.permute(0, 2, 1, 3).flatten(2)


def dot_product_attention(q, k, v, bias, dropout_rate, training):
    logits = torch.matmul(q, k.transpose(-1, -2))
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    weights = F.dropout(F.softmax(logits, dim=-1), dropout_rate, training)
    return torch.matmul(weights, v)


class MultiheadAttention(nn.Module):
    def __init__(self, hidden, num_heads, dropout_rate):
        super().__init__()
        self.num_heads, self.dropout_rate = num_heads, dropout_rate
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.output_transform = nn.Linear(hidden, hidden, bias=False)

    def forward(self, query_antecedent, memory_antecedent, bias):
        if memory_antecedent is None:
            memory_antecedent = query_antecedent
        q = split_heads(self.q(query_antecedent), self.num_heads)
        k = split_heads(self.k(memory_antecedent), self.num_heads)
        v = split_heads(self.v(memory_antecedent), self.num_heads)
        key_depth_per_head = q.size(-1)
        q = q * key_depth_per_head**-0.5
        x = dot_product_attention(q, k, v, bias, self.dropout_rate, self.training)
        return self.output_transform(combine_heads(x))


class Sublayers(nn.Module):
    """layer_preprocess_sequence = "n", layer_postprocess_sequence = "da"."""

    def __init__(self, c, names):
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.LayerNorm(c.d_model, eps=1e-6) for name in names})
        self.blocks = nn.ModuleDict(
            {name: MultiheadAttention(c.d_model, c.num_heads, c.dropout) for name in names if name != "ffn"}
        )
        self.conv1, self.conv2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.rate = c.dropout

    def layer_preprocess(self, name, x):
        return self.norms[name](x)

    def layer_postprocess(self, x, y):
        return x + F.dropout(y, self.rate, self.training)

    def attend(self, name, x, memory, bias):
        return self.layer_postprocess(x, self.blocks[name](self.layer_preprocess(name, x), memory, bias))

    def dense_relu_dense(self, x):
        y = F.relu(self.conv1(self.layer_preprocess("ffn", x)))
        return self.layer_postprocess(x, self.conv2(F.dropout(y, self.rate, self.training)))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hidden_size = c.d_model
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(Sublayers(c, ("self_attention", "ffn")) for _ in range(c.num_layers))
        names = ("self_attention", "encdec_attention", "ffn")
        self.decoder = nn.ModuleList(Sublayers(c, names) for _ in range(c.num_layers))
        self.encoder_norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.decoder_norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.rate = c.dropout

    def prepare(self, ids, mask):
        x = self.embedding(ids) * self.hidden_size**0.5
        padding = torch.zeros(ids.shape, dtype=x.dtype, device=x.device)
        if mask is not None:
            padding = 1.0 - mask.to(x.dtype)
        x = x * (1.0 - padding)[..., None]
        x = x + get_timing_signal_1d(ids.size(1), self.hidden_size, x)
        return F.dropout(x, self.rate, self.training), padding

    def encode(self, inputs, mask):
        x, padding = self.prepare(inputs, mask)
        bias = attention_bias_ignore_padding(padding)
        for layer in self.encoder:
            x = layer.attend("self_attention", x, None, bias)
            x = layer.dense_relu_dense(x)
        return self.encoder_norm(x), bias

    def forward(self, inputs, targets, inputs_mask=None, targets_mask=None):
        memory, memory_bias = self.encode(inputs, inputs_mask)
        x, padding = self.prepare(targets, targets_mask)
        bias = torch.minimum(attention_bias_lower_triangle(targets.size(1), x), attention_bias_ignore_padding(padding))
        for layer in self.decoder:
            x = layer.attend("self_attention", x, None, bias)
            x = layer.attend("encdec_attention", x, memory, memory_bias)
            x = layer.dense_relu_dense(x)
        return F.linear(self.decoder_norm(x), self.embedding.weight)


COMMON = dict(
    kind="encoder_decoder",
    build=Transformer,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "layout": "halves",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "output_bias": False,
        "tied": True,
        "embedding_scale": True,
    },
)
