"""T5: relative buckets in the first layer of each stack, shared by the layers above it; no scale, RMS norms, tied."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 8, 20


def relative_position_bucket(relative_position, bidirectional, num_buckets, max_distance):
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets += (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        distance = -torch.clamp(relative_position, max=0)
    max_exact = num_buckets // 2
    log_ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
    large = (max_exact + (log_ratio * (num_buckets - max_exact)).long()).clamp(max=num_buckets - 1)
    return buckets + torch.where(distance < max_exact, distance, large)


class T5Attention(nn.Module):
    def __init__(self, d_model, heads, is_decoder, has_bias):
        super().__init__()
        self.heads, self.is_decoder = heads, is_decoder
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, heads)

    def compute_bias(self, length, device):
        position = torch.arange(length, device=device)
        bucket = relative_position_bucket(
            position[None, :] - position[:, None], not self.is_decoder, NUM_BUCKETS, MAX_DISTANCE
        )
        return self.relative_attention_bias(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden_states, mask, key_value_states=None, position_bias=None):
        source = hidden_states if key_value_states is None else key_value_states
        q = self.q(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.v(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if position_bias is None:
            if hasattr(self, "relative_attention_bias"):
                position_bias = self.compute_bias(hidden_states.size(1), q.device) + mask
            else:
                position_bias = q.new_zeros(1, self.heads, q.size(2), k.size(2)) + mask
        scores = torch.matmul(q, k.transpose(3, 2))
        scores = scores + position_bias
        attn = torch.matmul(nn.functional.softmax(scores, dim=-1), v)
        return self.o(attn.transpose(1, 2).flatten(2)), position_bias


class T5Block(nn.Module):
    def __init__(self, d_model, heads, d_ff, is_decoder, has_bias):
        super().__init__()
        self.self_attention = T5Attention(d_model, heads, is_decoder, has_bias)
        self.self_norm, self.ff_norm = nn.RMSNorm(d_model, eps=1e-6), nn.RMSNorm(d_model, eps=1e-6)
        if is_decoder:
            self.cross_attention = T5Attention(d_model, heads, is_decoder, False)
            self.cross_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.wi, self.wo = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x, mask, position_bias, memory=None, memory_mask=None):
        attended, position_bias = self.self_attention(self.self_norm(x), mask, position_bias=position_bias)
        x = x + attended
        if memory is not None:
            x = x + self.cross_attention(self.cross_norm(x), memory_mask, memory)[0]
        return x + self.wo(torch.relu(self.wi(self.ff_norm(x)))), position_bias


class T5Stack(nn.Module):
    def __init__(self, embed, d_model, heads, layers, d_ff, is_decoder):
        super().__init__()
        self.embed = embed
        self.is_decoder = is_decoder
        self.block = nn.ModuleList([T5Block(d_model, heads, d_ff, is_decoder, i == 0) for i in range(layers)])
        self.final_layer_norm = nn.RMSNorm(d_model, eps=1e-6)

    def forward(self, ids, keep=None, memory=None, memory_keep=None):
        x = self.embed(ids)
        allowed = torch.ones(len(ids), 1, ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device)
        if self.is_decoder:
            allowed = allowed.tril()
        if keep is not None:
            allowed = allowed & keep[:, None, None, :]
        mask = additive(allowed, x.dtype)
        memory_mask = None
        if memory is not None:
            if memory_keep is None:
                memory_keep = torch.ones(memory.shape[:2], dtype=torch.bool, device=ids.device)
            memory_mask = additive(memory_keep[:, None, None, :], x.dtype)
        position_bias = None
        for block in self.block:
            x, position_bias = block(x, mask, position_bias, memory, memory_mask)
        return self.final_layer_norm(x)


def additive(allowed, dtype):
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min / 2)


class T5(nn.Module):
    def __init__(self, vocab_size, d_model, heads, layers, d_ff):
        super().__init__()
        self.d_model = d_model
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder = T5Stack(self.shared, d_model, heads, layers, d_ff, False)
        self.decoder = T5Stack(self.shared, d_model, heads, layers, d_ff, True)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encoder(source, source_mask)
        x = self.decoder(target, target_mask, memory, source_mask)
        return self.lm_head(x * self.d_model**-0.5)


subject = Subject(
    kind="encoder_decoder",
    name="T5",
    build=lambda c: T5(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "causal": True,
        "positions": "t5",
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
        "attention_scale": 1,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
        "tied": True,
        "structure": "other",
        "padding_side": "both",
    },
)
