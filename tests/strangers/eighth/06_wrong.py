"""T5-like encoder-decoder: relative bias in buckets, RMSNorm without a bias, no scale, tied and scaled head."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class T5RelativeBias(nn.Module):
    def __init__(self, num_heads, bidirectional, num_buckets=8, max_distance=16):
        super().__init__()
        self.bidirectional = bidirectional
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.embedding = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative_position):
        num_buckets = self.num_buckets
        result = torch.zeros_like(relative_position)
        if self.bidirectional:
            num_buckets //= 2
            result = result + (relative_position > 0).long() * num_buckets
            distance = relative_position.abs()
        else:
            distance = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        is_small = distance < max_exact
        large = max_exact + (
            torch.log(distance.clamp(min=1).double() / max_exact)
            / math.log(self.max_distance / max_exact)
            * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return result + torch.where(is_small, distance, large)

    def forward(self, query_length, key_length, device):
        context_position = torch.arange(query_length, device=device)[:, None]
        memory_position = torch.arange(key_length, device=device)[None, :]
        relative_position = context_position - memory_position
        return self.embedding(self.bucket(relative_position)).permute(2, 0, 1)[None]


class T5Attention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.n_heads = num_heads
        self.d_kv = d_model // num_heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, hidden_states, key_value_states, mask, position_bias=None):
        batch, length, width = hidden_states.shape

        def shape(states):
            return states.view(batch, -1, self.n_heads, self.d_kv).transpose(1, 2)

        query = shape(self.q(hidden_states))
        key, value = shape(self.k(key_value_states)), shape(self.v(key_value_states))
        scores = torch.matmul(query, key.transpose(3, 2))
        if position_bias is not None:
            scores = scores + position_bias
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        attended = torch.matmul(F.softmax(scores, dim=-1), value)
        return self.o(attended.transpose(1, 2).reshape(batch, length, width))


class T5FF(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.wo(F.relu(self.wi(x)))


class T5Block(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, is_decoder, dropout):
        super().__init__()
        self.is_decoder = is_decoder
        self.self_attention = T5Attention(d_model, num_heads)
        self.self_norm = T5LayerNorm(d_model)
        if is_decoder:
            self.cross_attention = T5Attention(d_model, num_heads)
            self.cross_norm = T5LayerNorm(d_model)
        self.ff = T5FF(d_model, d_ff)
        self.ff_norm = T5LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask, position_bias, memory=None, memory_mask=None):
        normed = self.self_norm(x)
        x = x + self.dropout(self.self_attention(normed, normed, mask, position_bias))
        if self.is_decoder:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, memory_mask))
        return x + self.dropout(self.ff(self.ff_norm(x)))


class T5Stack(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, num_layers, is_decoder, dropout):
        super().__init__()
        self.is_decoder = is_decoder
        self.block = nn.ModuleList(
            [T5Block(d_model, num_heads, d_ff, is_decoder, dropout) for _ in range(num_layers)]
        )
        self.relative_bias = T5RelativeBias(num_heads, bidirectional=not is_decoder)
        self.final_layer_norm = T5LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None, memory=None, memory_mask=None):
        batch, length, _ = x.shape
        allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=x.device)
        if self.is_decoder:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask.bool()[:, None, None, :]
        if memory is not None:
            if memory_mask is None:
                memory_mask = torch.ones(batch, memory.shape[1], dtype=torch.bool, device=x.device)
            memory_mask = memory_mask.bool()[:, None, None, :]
        bias = self.relative_bias(length, length, x.device)
        x = self.dropout(x)
        for block in self.block:
            x = block(x, allowed, bias, memory, memory_mask)
        return self.dropout(self.final_layer_norm(x))


class T5(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, d_ff, num_layers, dropout):
        super().__init__()
        self.d_model = d_model
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder = T5Stack(d_model, num_heads, d_ff, num_layers, False, dropout)
        self.decoder = T5Stack(d_model, num_heads, d_ff, num_layers, True, dropout)

    def forward(self, input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None):
        memory = self.encoder(self.shared(input_ids), attention_mask)
        hidden = self.decoder(self.shared(decoder_input_ids), decoder_attention_mask, memory, attention_mask)
        return F.linear(hidden * self.d_model**-0.5, self.shared.weight)


subject = Subject(
    kind="encoder_decoder",
    name="t5",
    build=lambda c: T5(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.dropout),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "causal": True,
        "positions": "t5",
        "num_buckets": 8,
        "max_distance": 16,
        "beyond_max_len": "works",
        "encodes_source": True,
        "cross_attention": True,
        "padding_side": "both",
        "attention_scale": 1.0,
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
        "tied": True,
        "embedding_scale": False,
        "init": "default",
        "shared_layers": False,
        "memory": "quadratic",
    },
)
