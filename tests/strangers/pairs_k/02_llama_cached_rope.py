"""A Llama in the style of a Hugging Face modeling file: config, output dataclass, grouped queries, rotary positions."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Keys are put into the cache after rotation, and the whole concatenated cache is rotated again at every step."
CAUSE = (
    "In cached decoding keys of the past are rotated a second time (rotary is applied to the concatenated keys, which the "
    "cache already holds rotated), so relative positions are wrong from the second chunk on."
)


@dataclass
class TinyLlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


@dataclass
class CausalLMOutputWithPast:
    logits: Tensor
    past_key_values: Optional[list] = None


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        wide = hidden_states if dtype == torch.float64 else hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(dtype)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rope_tables(position_ids, head_dim, theta, dtype):
    exponent = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float64) / head_dim
    freqs = position_ids[:, None].double() * theta**-exponent
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos().to(dtype), emb.sin().to(dtype)


def rotate(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def build_llama(rotate_before_cat):
    class LlamaAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_heads = config.num_attention_heads
            self.num_key_value_heads = config.num_key_value_heads
            self.head_dim = config.hidden_size // config.num_attention_heads
            self.theta = config.rope_theta
            self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
            self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
            self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
            self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

        def forward(self, hidden_states, past_key_value=None):
            bsz, q_len, _ = hidden_states.shape
            query = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
            key = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
            value = self.v_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)

            past_len = 0 if past_key_value is None else past_key_value[0].shape[-2]
            total = past_len + q_len
            cos, sin = rope_tables(
                torch.arange(total, device=query.device), self.head_dim, self.theta, query.dtype
            )
            query = rotate(query, cos[past_len:], sin[past_len:])
            if rotate_before_cat:
                key = rotate(key, cos[past_len:], sin[past_len:])
            if past_key_value is not None:
                key = torch.cat([past_key_value[0], key], dim=2)
                value = torch.cat([past_key_value[1], value], dim=2)
            if not rotate_before_cat:
                key = rotate(key, cos, sin)
            present = (key, value)

            groups = self.num_heads // self.num_key_value_heads
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            scores = torch.matmul(query, key.transpose(2, 3)) * self.head_dim**-0.5
            causal = torch.ones(q_len, total, dtype=torch.bool, device=query.device).triu(past_len + 1)
            scores = scores.masked_fill(causal, torch.finfo(scores.dtype).min)
            weights = F.softmax(scores, dim=-1)
            output = torch.matmul(weights, value).transpose(1, 2).reshape(bsz, q_len, -1)
            return self.o_proj(output), present

    class LlamaMLP(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
            self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
            self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class LlamaDecoderLayer(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.self_attn = LlamaAttention(config)
            self.mlp = LlamaMLP(config)
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

        def forward(self, hidden_states, past_key_value=None):
            residual = hidden_states
            hidden_states, present = self.self_attn(self.input_layernorm(hidden_states), past_key_value)
            hidden_states = residual + hidden_states
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), present

    class LlamaForCausalLM(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList([LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)])
            self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        def forward(self, input_ids, past_key_values=None):
            hidden_states = self.embed_tokens(input_ids)
            presents = []
            for i, layer in enumerate(self.layers):
                past = None if past_key_values is None else past_key_values[i]
                hidden_states, present = layer(hidden_states, past)
                presents.append(present)
            return CausalLMOutputWithPast(self.lm_head(self.norm(hidden_states)), presents)

    return LlamaForCausalLM


def subject(flag):
    cls = build_llama(flag)

    def build(c):
        return cls(
            TinyLlamaConfig(
                c.vocab_size, c.d_model, c.d_ff, c.num_layers, c.num_heads, c.num_key_value_heads
            )
        )

    def cached(model, chunks):
        past, out = None, []
        for chunk in chunks:
            result = model(chunk, past)
            past = result.past_key_values
            out.append(result.logits)
        return torch.cat(out, 1)

    return Subject(
        kind="decoder",
        name="tiny Llama",
        build=build,
        forward=lambda m, tokens: m(tokens).logits,
        cache=cached,
        declares={
            "causal": True,
            "positions": "rotary",
            "layout": "halves",
            "grouped_queries": True,
            "norm": "rms",
            "norm_placement": "pre",
            "final_norm": True,
            "activation": "swiglu",
            "bias": False,
            "tied": False,
        },
    )


right = subject(True)
wrong = subject(False)
