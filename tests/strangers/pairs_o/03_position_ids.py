"""A causal language model with the interface of transformers: position ids are made of the attention mask."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Behind the prompt every token of a chunk gets the position of the chunk's last token."
CAUSE = (
    "When inputs are prepared for a step with a cache, the last column of the position ids is taken instead of as many "
    "columns as there are new tokens, so that a chunk of several tokens shares one learned position."
)


class TinyConfig:
    model_type = "tiny"

    def __init__(self, **sizes):
        self.__dict__.update(sizes)


class TinyAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, allowed, past_key_value=None):
        split = (*hidden_states.shape[:2], self.num_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(split).transpose(1, 2)
        key = self.k_proj(hidden_states).view(split).transpose(1, 2)
        value = self.v_proj(hidden_states).view(split).transpose(1, 2)
        if past_key_value is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(past_key_value, (key, value)))
        scores = torch.matmul(query, key.transpose(2, 3)) * self.head_dim**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(dim=-1), value)
        return self.o_proj(context.transpose(1, 2).reshape(hidden_states.shape)), (key, value)


class TinyLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = TinyAttention(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states, allowed, past_key_value=None):
        attended, present = self.self_attn(self.input_layernorm(hidden_states), allowed, past_key_value)
        hidden_states = hidden_states + attended
        inner = nn.functional.relu(self.fc1(self.post_attention_layernorm(hidden_states)))
        return hidden_states + self.fc2(inner), present


class TinyForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(TinyLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None):
        past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        new = input_ids.shape[1]
        if attention_mask is None:
            attention_mask = input_ids.new_ones(input_ids.shape[0], past + new)
        attention_mask = attention_mask.bool()
        if position_ids is None:
            position_ids = self.positions_of(attention_mask)[:, past:]
        causal = torch.ones(new, past + new, dtype=torch.bool, device=input_ids.device).tril(past)
        allowed = causal & attention_mask[:, None, None, :]
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        presents = []
        for i, layer in enumerate(self.layers):
            hidden_states, present = layer(hidden_states, allowed, None if past == 0 else past_key_values[i])
            presents.append(present)
        return self.lm_head(self.norm(hidden_states)), presents

    @staticmethod
    def positions_of(attention_mask):
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)

    def prepare_inputs_for_generation(self, input_ids, attention_mask, past_key_values=None):
        position_ids = self.positions_of(attention_mask)
        if past_key_values is not None:
            position_ids = position_ids[:, -input_ids.shape[1] :]
        return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
                "past_key_values": past_key_values}  # fmt: skip


class TinyForCausalLMOneColumn(TinyForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, attention_mask, past_key_values=None):
        position_ids = self.positions_of(attention_mask)
        if past_key_values is not None:
            position_ids = position_ids[:, -1].unsqueeze(-1)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
                "past_key_values": past_key_values}  # fmt: skip


@torch.no_grad()
def decode(model, chunks, attention_mask=None):
    if attention_mask is None:
        attention_mask = torch.ones_like(torch.cat(list(chunks), dim=1))
    outputs, past, end = [], None, 0
    for chunk in chunks:
        end += chunk.shape[1]
        logits, past = model(**model.prepare_inputs_for_generation(chunk, attention_mask[:, :end], past))
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


def subject(cls):
    return Subject(
        kind="decoder",
        build=lambda c: cls(
            TinyConfig(vocab_size=c.vocab_size, hidden_size=c.d_model, num_attention_heads=c.num_heads,
                       num_hidden_layers=c.num_layers, intermediate_size=c.d_ff, max_position_embeddings=c.max_len)
        ),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
        cache=decode,
        mask_forms=("padding",),
        declares={"positions": "learned", "padding_side": "both", "norm_placement": "pre", "activation": "relu",
                  "cached_chunks": True},
    )  # fmt: skip


right = subject(TinyForCausalLM)
wrong = subject(TinyForCausalLMOneColumn)
