"""The decoder stack of T5 as a language model: no cross-attention, one table of relative biases for all layers."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 32, 128


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)


class T5Attention(nn.Module):
    def __init__(self, d_model, num_heads, dropout, has_relative_attention_bias=False):
        super().__init__()
        self.n_heads, self.d_kv = num_heads, d_model // num_heads
        self.has_relative_attention_bias = has_relative_attention_bias
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, num_heads)

    @staticmethod
    def _relative_position_bucket(relative_position, num_buckets, max_distance):
        """relative_position: key minus query; what lies ahead is in bucket 0, and hidden by the mask."""
        distance = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        is_small = distance < max_exact
        if_large = max_exact + (
            torch.log(distance.clamp(min=1).double() / max_exact)
            / math.log(max_distance / max_exact)
            * (num_buckets - max_exact)
        ).to(torch.long)
        if_large = torch.min(if_large, torch.full_like(if_large, num_buckets - 1))
        return torch.where(is_small, distance, if_large)

    def compute_bias(self, query_length, key_length, device):
        context_position = torch.arange(key_length - query_length, key_length, device=device)[:, None]
        memory_position = torch.arange(key_length, device=device)[None, :]
        buckets = self._relative_position_bucket(memory_position - context_position, NUM_BUCKETS, MAX_DISTANCE)
        return self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden_states, allowed, position_bias=None, past=None):
        batch_size, seq_length = hidden_states.shape[:2]

        def shape(states):
            return states.view(batch_size, -1, self.n_heads, self.d_kv).transpose(1, 2)

        q, k, v = shape(self.q(hidden_states)), shape(self.k(hidden_states)), shape(self.v(hidden_states))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)

        scores = torch.matmul(q, k.transpose(3, 2))
        if position_bias is None:
            if not self.has_relative_attention_bias:
                position_bias = torch.zeros(
                    (1, self.n_heads, seq_length, k.shape[2]), device=scores.device, dtype=scores.dtype
                )
            else:
                position_bias = self.compute_bias(seq_length, k.shape[2], scores.device)
        scores = (scores + position_bias).masked_fill(~allowed, torch.finfo(scores.dtype).min)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        weights = self.dropout(nn.functional.softmax(wide, dim=-1).type_as(v))
        output = torch.matmul(weights, v).transpose(1, 2).reshape(batch_size, seq_length, -1)
        return self.o(output), position_bias, (k, v)


class T5Block(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, dropout, has_relative_attention_bias):
        super().__init__()
        self.attention_norm = T5LayerNorm(d_model)
        self.self_attention = T5Attention(d_model, num_heads, dropout, has_relative_attention_bias)
        self.ff_norm = T5LayerNorm(d_model)
        self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, allowed, position_bias, past):
        attended, position_bias, present = self.self_attention(
            self.attention_norm(hidden_states), allowed, position_bias, past
        )
        hidden_states = hidden_states + self.dropout(attended)
        inner = self.dropout(nn.functional.relu(self.wi(self.ff_norm(hidden_states))))
        return hidden_states + self.dropout(self.wo(inner)), position_bias, present


class T5DecoderLM(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, dropout):
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.block = nn.ModuleList(
            [T5Block(d_model, num_heads, d_ff, dropout, has_relative_attention_bias=i == 0) for i in range(num_layers)]
        )
        self.final_layer_norm = T5LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self._init_weights(d_model, d_model // num_heads, d_ff)

    def _init_weights(self, d_model, d_kv, d_ff):
        self.shared.weight.data.normal_(std=1.0)
        self.lm_head.weight.data.normal_(std=d_model**-0.5)
        for block in self.block:
            attention = block.self_attention
            attention.q.weight.data.normal_(std=(d_model * d_kv) ** -0.5)
            for linear in (attention.k, attention.v, attention.o):
                linear.weight.data.normal_(std=d_model**-0.5)
            if attention.has_relative_attention_bias:
                attention.relative_attention_bias.weight.data.normal_(std=d_model**-0.5)
            block.wi.weight.data.normal_(std=d_model**-0.5)
            block.wo.weight.data.normal_(std=d_ff**-0.5)

    def forward(self, input_ids, attention_mask=None, past=None):
        hidden_states = self.dropout(self.shared(input_ids))
        length = input_ids.shape[1]
        seen = past[0][0].shape[2] if past is not None else 0
        allowed = torch.ones(length, seen + length, dtype=torch.bool, device=input_ids.device).tril(seen)
        allowed = allowed[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        presents, position_bias = [], None
        for i, layer_module in enumerate(self.block):
            hidden_states, _, present = layer_module(
                hidden_states, allowed, position_bias, past[i] if past is not None else None
            )
            presents.append(present)
        return self.lm_head(self.dropout(self.final_layer_norm(hidden_states))), presents


def cached(model, chunks, attention_mask=None, reorder=None):
    past, outputs, seen = None, [], 0
    for chunk in chunks:
        seen += chunk.shape[1]
        logits, past = model(chunk, None if attention_mask is None else attention_mask[:, :seen], past)
        if not outputs and reorder is not None:
            past = [(k[reorder], v[reorder]) for k, v in past]
            attention_mask = None if attention_mask is None else attention_mask[reorder]
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def greedy(model, tokens, steps, use_cache):
    past, fresh = None, tokens
    for _ in range(steps):
        logits, past = model(fresh, past=past)
        best = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
        fresh, past = (best, past) if use_cache else (tokens, None)
    return tokens


subject = Subject(
    kind="decoder",
    name="T5 decoder",
    build=lambda c: T5DecoderLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
    cache=cached,
    generate=greedy,
    declares={
        "causal": True,
        "positions": "t5",
        "bidirectional": False,
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
        "attention_scale": "1",
        "tied": False,
        "embedding_scale": False,
        "init": "other",
        "padding_side": "both",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)
