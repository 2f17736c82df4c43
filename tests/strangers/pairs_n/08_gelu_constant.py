"""A pre-norm encoder layer in the house style of Hugging Face, with the activation table of `ACT2FN`."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The tanh form of GELU has sqrt(2) / pi where sqrt(2 / pi) belongs."
CAUSE = (
    "The factor inside the tanh of the feed-forward's activation is 0.450 instead of 0.798 (a bracket in the wrong "
    "place), so the activation is not the tanh approximation of GELU but a flatter curve."
)


@dataclass
class EncoderConfig:
    hidden_size: int = 32
    num_attention_heads: int = 4
    intermediate_size: int = 64
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5


class NewGELUActivation(nn.Module):
    def forward(self, x):
        inner = x + 0.044715 * torch.pow(x, 3)
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * inner))


class FastNewGELUActivation(nn.Module):
    def forward(self, x):
        inner = x + 0.044715 * torch.pow(x, 3)
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0) / math.pi * inner))


ACT2FN = {"gelu_new": NewGELUActivation, "gelu_new_fast": FastNewGELUActivation}


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        probs = scores.softmax(dim=-1)
        if attention_mask is not None:
            probs = probs.masked_fill(~attention_mask[:, None, None, :], 0.0)
        context = (probs @ v).permute(0, 2, 1, 3).flatten(2)
        return self.dense(context)


class EncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]()
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        hidden_states = hidden_states + self.attention(self.layernorm_before(hidden_states), attention_mask)
        inner = self.intermediate_act_fn(self.intermediate(self.layernorm_after(hidden_states)))
        return hidden_states + self.output(inner)


def build(c, act):
    return EncoderLayer(EncoderConfig(c.d_model, c.num_heads, c.d_ff, act))


def subject(act):
    return Subject(
        kind="layer",
        name=f"EncoderLayer[{act}]",
        build=lambda c: build(c, act),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "none",
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu_tanh",
        },
    )


right = subject("gelu_new")
wrong = subject("gelu_new_fast")
