WHAT = "the relative position has the wrong sign (line 45): every visible key is 'not in the past', falls into bucket 0, and order is lost"
import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 8, 20


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class RelativeBias(nn.Module):
    """One table for the whole stack, as T5 has it; the past alone is told apart."""

    def __init__(self, num_heads):
        super().__init__()
        self.table = nn.Embedding(NUM_BUCKETS, num_heads)

    @staticmethod
    def bucket(relative_position):
        distance = -torch.clamp(relative_position, max=0)
        max_exact = NUM_BUCKETS // 2
        large = max_exact + (
            torch.log(distance.clamp(min=1).double() / max_exact)
            / math.log(MAX_DISTANCE / max_exact)
            * (NUM_BUCKETS - max_exact)
        ).long()
        large = large.clamp(max=NUM_BUCKETS - 1)
        return torch.where(distance < max_exact, distance, large)

    def forward(self, length, device):
        context = torch.arange(length, device=device)[:, None]
        memory = torch.arange(length, device=device)[None, :]
        buckets = self.bucket(context - memory)
        return self.table(buckets).permute(2, 0, 1)  # H, T, S


class T5Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, hidden_states, position_bias):
        batch, length, width = hidden_states.shape

        def shape(states):
            return states.view(batch, length, self.n_heads, -1).transpose(1, 2)

        q, k, v = shape(self.q(hidden_states)), shape(self.k(hidden_states)), shape(self.v(hidden_states))
        scores = torch.matmul(q, k.transpose(3, 2))  # T5 does not scale
        scores = scores + position_bias
        weights = nn.functional.softmax(scores, dim=-1)
        return self.o(torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width))


class T5Block(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attention_norm = T5LayerNorm(d_model)
        self.attention = T5Attention(d_model, n_heads)
        self.ff_norm = T5LayerNorm(d_model)
        self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, hidden_states, position_bias):
        hidden_states = hidden_states + self.attention(self.attention_norm(hidden_states), position_bias)
        return hidden_states + self.wo(torch.relu(self.wi(self.ff_norm(hidden_states))))


class T5DecoderOnly(nn.Module):
    def __init__(self, vocab_size, d_model, n_heads, n_layers, d_ff):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, d_model)
        self.relative_bias = RelativeBias(n_heads)
        self.block = nn.ModuleList([T5Block(d_model, n_heads, d_ff) for _ in range(n_layers)])
        self.final_layer_norm = T5LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        position_bias = self.relative_bias(length, input_ids.device).masked_fill(future, float("-inf"))
        hidden_states = self.embed_tokens(input_ids)
        for block in self.block:
            hidden_states = block(hidden_states, position_bias)
        return self.lm_head(self.final_layer_norm(hidden_states))


subject = Subject(
    kind="decoder",
    name="T5 decoder only",
    build=lambda c: T5DecoderOnly(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    declares={
        "positions": "t5", "num_buckets": NUM_BUCKETS, "max_distance": MAX_DISTANCE, "bidirectional": False,
        "attention_scale": 1, "norm": "rms", "norm_placement": "pre", "final_norm": True,
        "activation": "relu", "bias": False,
    },
)
