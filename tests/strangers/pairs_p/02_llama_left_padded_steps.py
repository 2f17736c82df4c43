"""A small Llama in the manner of Hugging Face: config class, position_ids from the attention mask, a tuple cache."""

from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject


@dataclass
class TinyLlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 10000.0
    positions_of_steps: str = "mask"  # "mask": real tokens are counted; "length": what lies in the cache is counted


class TinyLlamaRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class TinyLlamaAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.head_dim = cfg, cfg.hidden_size // cfg.num_attention_heads
        if self.head_dim % 2:
            raise ValueError("rotary embeddings need an even head_dim")
        kv = cfg.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)

    def forward(self, x, position_ids, allowed, past):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device) / self.head_dim
        angles = position_ids[:, None, :, None].double() * self.cfg.rope_theta**-steps
        cos, sin = (torch.cat((f(angles),) * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        groups = self.cfg.num_attention_heads // self.cfg.num_key_value_heads
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ keys.transpose(2, 3) * self.head_dim**-0.5
        weights = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        return self.o_proj((weights @ values).transpose(1, 2).reshape(b, t, d)), (k, v)


class TinyLlamaDecoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.self_attn = TinyLlamaAttention(cfg)
        self.input_layernorm, self.post_attention_layernorm = (TinyLlamaRMSNorm(cfg.hidden_size) for _ in range(2))
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x, position_ids, allowed, past=None):
        attended, present = self.self_attn(self.input_layernorm(x), position_ids, allowed, past)
        x = x + attended
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h)), present


class TinyLlamaForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TinyLlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = TinyLlamaRMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        b, t = input_ids.shape
        past_len = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        if attention_mask is None:
            attention_mask = torch.ones(b, past_len + t, dtype=torch.bool, device=input_ids.device)
        attention_mask = attention_mask.bool()  # [B, past + t]
        if past_key_values is None or self.config.positions_of_steps == "mask":
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past_len:]
        else:
            position_ids = torch.arange(past_len, past_len + t, device=input_ids.device).expand(b, t)
        eye = torch.eye(past_len + t, dtype=torch.bool, device=input_ids.device)
        allowed = ((torch.ones_like(eye).tril() & attention_mask[:, None]) | eye)[:, past_len:]
        x, presents = self.embed_tokens(input_ids), []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, position_ids, allowed, None if past_key_values is None else past_key_values[i])
            presents.append(present)
        return self.lm_head(self.norm(x)), tuple(presents)


def make(rule):
    def build(c):
        return TinyLlamaForCausalLM(
            TinyLlamaConfig(c.vocab_size, c.d_model, c.d_ff, c.num_layers, c.num_heads, c.num_key_value_heads, 10000.0, rule)
        )

    def cache(model, chunks, attention_mask=None):
        outputs, past, seen = [], None, 0
        for chunk in chunks:
            seen += chunk.shape[1]
            logits, past = model(chunk, None if attention_mask is None else attention_mask[:, :seen], past)
            outputs.append(logits)
        return torch.cat(outputs, 1)

    return Subject(
        kind="decoder",
        name=f"tiny llama ({rule})",
        build=build,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
        cache=cache,
        declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre",
                  "activation": "swiglu", "bias": False, "grouped_queries": True, "padding_side": "both"},
    )


right, wrong = make("mask"), make("length")

WHAT = "In decoding steps position_ids are taken from the length of the cache, while the prompt's were counted from the mask."
CAUSE = (
    "With left padding the prompt's keys are rotated by positions that count real tokens only, but cached steps rotate queries "
    "and keys by past_len + i, padding included: distances are too large by the number of padded tokens."
)
