WHAT = 'With a cache, rotary positions of later chunks are counted from the length of the cache (`position_ids = torch.arange(past_len, past_len + steps)`) while those of the prompt are counted from the mask, so left-padded samples jump ahead by their padding when decoding goes on.'
"""A small Llama: RMSNorm, rotary, grouped queries, SwiGLU, batched decoding with padding on either side."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class LlamaAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, hidden_states, cos, sin, allowed, past):
        bsz, q_len, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        present = (k, v)
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        out = scores.softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(bsz, q_len, -1)), present


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads, intermediate_size):
        super().__init__()
        self.self_attn = LlamaAttention(hidden_size, num_heads, num_kv_heads)
        self.mlp = LlamaMLP(hidden_size, intermediate_size)
        self.input_layernorm = LlamaRMSNorm(hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(hidden_size)

    def forward(self, x, cos, sin, allowed, past):
        attended, present = self.self_attn(self.input_layernorm(x), cos, sin, allowed, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), present


class LlamaForCausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_kv_heads, num_layers, intermediate_size, base=10000.0):
        super().__init__()
        head_dim = hidden_size // num_heads
        if head_dim % 2:
            raise ValueError("rotary positions need heads of even width")
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(hidden_size, num_heads, num_kv_heads, intermediate_size) for _ in range(num_layers)
        )
        self.norm = LlamaRMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        inv_freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        """`attention_mask` covers what is cached and `input_ids`."""
        batch, steps = input_ids.shape
        past_len = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        device = input_ids.device
        if attention_mask is None:
            attention_mask = torch.ones(batch, past_len + steps, dtype=torch.bool, device=device)
        attention_mask = attention_mask.bool()

        if past_key_values is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        else:
            position_ids = torch.arange(past_len, past_len + steps, device=device).expand(batch, -1)

        x = self.embed_tokens(input_ids)
        angles = position_ids[:, None, :, None].to(torch.float64) * self.inv_freq.to(torch.float64)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        query = torch.arange(past_len, past_len + steps, device=device)[:, None]
        key = torch.arange(past_len + steps, device=device)[None, :]
        allowed = (key <= query) & attention_mask[:, None, None, :]
        allowed = allowed | (key == query)  # a padded query sees itself, never nothing

        presents = []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, cos, sin, allowed, None if past_key_values is None else past_key_values[i])
            presents.append(present)
        return self.lm_head(self.norm(x)), presents


def cached(model, chunks, attention_mask=None, reorder=None):
    past, seen, outputs = None, 0, []
    for i, chunk in enumerate(chunks):
        seen += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :seen]
        logits, past = model(chunk, mask, past)
        outputs.append(logits)
        if i == 0 and reorder is not None:
            past = [(k.index_select(0, reorder), v.index_select(0, reorder)) for k, v in past]
            if attention_mask is not None:
                attention_mask = attention_mask.index_select(0, reorder)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="small Llama",
    build=lambda c: LlamaForCausalLM(
        c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
    cache=cached,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "grouped_queries": True,
        "padding_side": "both",
    },
)
