"""GPT-2 with left padding, a key-value cache and beams."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class DynamicCache:
    def __init__(self, num_layers, batch, device):
        self.keys = [None] * num_layers
        self.values = [None] * num_layers
        self.padding = None
        self.next_position = torch.zeros(batch, dtype=torch.long, device=device)

    def update(self, layer, k, v):
        if self.keys[layer] is not None:
            k = torch.cat([self.keys[layer], k], dim=-2)
            v = torch.cat([self.values[layer], v], dim=-2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def advance(self, mask):
        """Positions of the new tokens: padding does not count."""
        positions = self.next_position[:, None] + mask.long().cumsum(1) - 1
        self.next_position = self.next_position + mask.sum(1)
        self.padding = mask if self.padding is None else torch.cat([self.padding, mask], dim=1)
        return positions.clamp(min=0)

    def reorder(self, beam_idx):
        self.keys = [k.index_select(0, beam_idx) for k in self.keys]
        self.values = [v.index_select(0, beam_idx) for v in self.values]
        self.padding = self.padding.index_select(0, beam_idx)
        self.next_position = self.next_position.index_select(0, beam_idx)


class GPT2Block(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.index, self.num_heads = index, c.num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.c_attn, self.c_proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.c_fc, self.c_out = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, hidden_states, allowed, cache):
        b, t, d = hidden_states.shape
        q, k, v = (
            part.view(b, t, self.num_heads, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(hidden_states)).split(d, dim=-1)
        )
        k, v = cache.update(self.index, k, v)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        hidden_states = hidden_states + self.c_proj(context.transpose(1, 2).reshape(b, t, d))
        return hidden_states + self.c_out(F.gelu(self.c_fc(self.ln_2(hidden_states)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(GPT2Block(c, i) for i in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)

    def forward(self, input_ids, attention_mask=None, cache=None):
        b, t = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones(b, t, dtype=torch.bool, device=input_ids.device)
        if cache is None:
            cache = DynamicCache(len(self.h), b, input_ids.device)
        position_ids = cache.advance(attention_mask)
        total = cache.padding.shape[1]
        causal = torch.ones(t, total, dtype=torch.bool, device=input_ids.device).tril(total - t)
        itself = torch.eye(total, dtype=torch.bool, device=input_ids.device)[total - t :]
        allowed = (causal & cache.padding[:, None, None, :]) | itself  # no query is left without a key
        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            hidden_states = block(hidden_states, allowed, cache)
        return F.linear(self.ln_f(hidden_states), self.wte.weight)


def cached(model, chunks, attention_mask=None, reorder=None):
    cache = DynamicCache(len(model.h), chunks[0].shape[0], chunks[0].device)
    done, outputs = 0, []
    for i, chunk in enumerate(chunks):
        mask = None if attention_mask is None else attention_mask[:, done : done + chunk.shape[1]]
        outputs.append(model(chunk, mask, cache))
        done += chunk.shape[1]
        if i == 0 and reorder is not None:
            cache.reorder(reorder)
            attention_mask = None if attention_mask is None else attention_mask.index_select(0, reorder)
    return outputs


subject = Subject(
    kind="decoder",
    name="GPT-2 with beams",
    build=GPT2,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=cached,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": True,
        "padding_side": "both",
    },
)
