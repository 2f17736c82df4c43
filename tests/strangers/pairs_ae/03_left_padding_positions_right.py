"""GPT-2 in the manner of Hugging Face: past_key_values, position_ids made of the attention mask."""

from typing import List, Optional, Tuple

import torch
from torch import nn
from torch.nn.functional import gelu

from veriformer.properties import Subject


class TinyAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.c_attn = nn.Linear(hidden_size, 3 * hidden_size)
        self.c_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, bias, layer_past=None):
        bsz, q_len, _ = hidden_states.size()
        query, key, value = self.c_attn(hidden_states).split(hidden_states.size(-1), dim=2)
        query = query.view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key = key.view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        value = value.view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        if layer_past is not None:
            key = torch.cat([layer_past[0], key], dim=-2)
            value = torch.cat([layer_past[1], value], dim=-2)
        attn_weights = torch.matmul(query, key.transpose(-1, -2)) / self.head_dim**0.5 + bias
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_output = torch.matmul(attn_weights, value).transpose(1, 2).contiguous().view(bsz, q_len, -1)
        return self.c_proj(attn_output), (key, value)


class TinyBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, inner):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.attn = TinyAttention(hidden_size, num_heads)
        self.c_fc, self.c_proj = nn.Linear(hidden_size, inner), nn.Linear(inner, hidden_size)

    def forward(self, hidden_states, bias, layer_past=None):
        attn_output, present = self.attn(self.ln_1(hidden_states), bias, layer_past)
        hidden_states = hidden_states + attn_output
        feed_forward = self.c_proj(gelu(self.c_fc(self.ln_2(hidden_states)), approximate="tanh"))
        return hidden_states + feed_forward, present


class TinyGPT2LMHeadModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.wpe = nn.Embedding(config.max_len, config.d_model)
        self.h = nn.ModuleList([TinyBlock(config.d_model, config.num_heads, config.d_ff) for _ in range(config.num_layers)])
        self.ln_f = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def prepare_inputs(self, input_ids, past_length, attention_mask):
        position_ids = attention_mask.long().cumsum(-1) - 1
        position_ids = position_ids.clamp(min=0)
        if past_length > 0:
            position_ids = position_ids[:, -input_ids.shape[1] :]
        return {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}

    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.BoolTensor,
        position_ids: torch.LongTensor,
        past_key_values: Optional[List[Tuple[torch.Tensor, torch.Tensor]]] = None,
    ):
        q_len, kv_len = input_ids.size(1), attention_mask.size(1)
        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=input_ids.device).tril(kv_len - q_len)
        visible = visible[None, None] & attention_mask[:, None, None, :]
        bias = torch.zeros(visible.shape, dtype=hidden_states.dtype, device=visible.device)
        bias = bias.masked_fill(~visible, torch.finfo(hidden_states.dtype).min)
        presents = []
        for i, block in enumerate(self.h):
            hidden_states, present = block(hidden_states, bias, past_key_values[i] if past_key_values else None)
            presents.append(present)
        return self.lm_head(self.ln_f(hidden_states)), presents


def run(model, tokens, attention_mask=None):
    if attention_mask is None:
        attention_mask = torch.ones_like(tokens, dtype=torch.bool)
    return model(**model.prepare_inputs(tokens, 0, attention_mask))[0]


def decode(model, chunks, attention_mask=None):
    if attention_mask is None:
        attention_mask = torch.ones_like(torch.cat(chunks, dim=1), dtype=torch.bool)
    past, seen, logits = None, 0, []
    for chunk in chunks:
        inputs = model.prepare_inputs(chunk, seen, attention_mask[:, : seen + chunk.size(1)])
        out, past = model(**inputs, past_key_values=past)
        seen += chunk.size(1)
        logits.append(out)
    return torch.cat(logits, dim=1)


subject = Subject(
    kind="decoder",
    name="TinyGPT2LMHeadModel",
    build=TinyGPT2LMHeadModel,
    forward=run,
    cache=decode,
    mask_forms=("padding",),
    declares={
        "causal": True,
        "positions": "learned",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
    },
)
