"""GPT-2 as in transformers, extended for batched generation: left padding, past_key_values."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class GPT2Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads, self.embed_dim = config.num_heads, config.d_model
        self.c_attn = nn.Linear(self.embed_dim, 3 * self.embed_dim)
        self.c_proj = nn.Linear(self.embed_dim, self.embed_dim)

    def _split_heads(self, tensor):
        return tensor.unflatten(-1, (self.num_heads, self.embed_dim // self.num_heads)).transpose(1, 2)

    def forward(self, hidden_states, allowed, layer_past=None):
        query, key, value = map(self._split_heads, self.c_attn(hidden_states).split(self.embed_dim, dim=2))
        if layer_past is not None:
            key = torch.cat((layer_past[0], key), dim=-2)
            value = torch.cat((layer_past[1], value), dim=-2)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.c_proj(out.transpose(1, 2).flatten(2)), (key, value)


class GPT2Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.c_fc = nn.Linear(config.d_model, config.d_ff)
        self.c_proj = nn.Linear(config.d_ff, config.d_model)

    def forward(self, hidden_states, allowed, layer_past=None):
        attn_output, present = self.attn(self.ln_1(hidden_states), allowed, layer_past)
        hidden_states = hidden_states + attn_output
        feed_forward = self.c_proj(F.gelu(self.c_fc(self.ln_2(hidden_states)), approximate="tanh"))
        return hidden_states + feed_forward, present


class GPT2LMHeadModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.wpe = nn.Embedding(config.max_len, config.d_model)
        self.h = nn.ModuleList([GPT2Block(config) for _ in range(config.num_layers)])
        self.ln_f = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    @staticmethod
    def prepare_position_ids(input_ids, attention_mask, past_length):
        """Real tokens are counted from 0, whatever stands to their left."""
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return position_ids[:, past_length:]

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        batch, length = input_ids.shape
        past_length = 0 if past_key_values is None else past_key_values[0][0].shape[-2]
        total = past_length + length
        if attention_mask is None:
            attention_mask = torch.ones(batch, total, dtype=torch.bool, device=input_ids.device)
        attention_mask = attention_mask.bool()
        position_ids = self.prepare_position_ids(input_ids, attention_mask, past_length)

        causal = torch.ones(total, total, dtype=torch.bool, device=input_ids.device).tril()
        own = torch.eye(total, dtype=torch.bool, device=input_ids.device)  # no row is empty
        allowed = ((causal & attention_mask[:, None, :]) | own)[:, None, past_length:, :]

        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        presents = []
        for i, block in enumerate(self.h):
            layer_past = None if past_key_values is None else past_key_values[i]
            hidden_states, present = block(hidden_states, allowed, layer_past)
            presents.append(present)
        return self.lm_head(self.ln_f(hidden_states)), presents


def run_cached(model, chunks, attention_mask=None):
    past, done, outputs = None, 0, []
    for chunk in chunks:
        done += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :done]
        logits, past = model(chunk, mask, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-2 with left padding and a cache",
    build=GPT2LMHeadModel,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
    cache=run_cached,
    mask_forms=("padding",),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu_tanh",
        "padding_side": "both",
    },
)
