"""A decoder in the manner of PreTrainedModel; two chat tokens are added to the vocabulary after construction."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size)

    def forward(self, hidden_states):
        b, t, d = hidden_states.shape
        qkv = self.query_key_value(hidden_states).reshape(b, t, 3, self.num_attention_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        context = context.transpose(1, 2).reshape(b, t, d)
        hidden_states = self.attention_norm(hidden_states + self.dense(context))
        inner = nn.functional.relu(self.intermediate(hidden_states))
        return self.output_norm(hidden_states + self.output(inner))


class DecoderForCausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_layers, intermediate_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(Layer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.lm_head.weight = self.word_embeddings.weight

    @torch.no_grad()
    def resize_token_embeddings(self, new_num_tokens):
        """New rows start at the mean of the old ones."""
        old = self.word_embeddings.weight
        kept = min(len(old), new_num_tokens)
        table = old.mean(0, keepdim=True).repeat(new_num_tokens, 1)
        table[:kept] = old[:kept]
        self.word_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        head = nn.Linear(self.hidden_size, new_num_tokens, bias=False)
        head.weight.copy_(table)
        self.lm_head = head
        self.tie_weights()
        return self.word_embeddings

    def sinusoids(self, length, like):
        at = torch.arange(length, dtype=like.dtype, device=like.device)[:, None]
        channel = torch.arange(self.hidden_size, device=like.device)
        rate = torch.exp(-math.log(10000.0) * (2 * (channel // 2)).to(like.dtype) / self.hidden_size)
        return torch.where(channel % 2 == 0, torch.sin(at * rate), torch.cos(at * rate))

    def forward(self, input_ids):
        hidden_states = self.word_embeddings(input_ids) * math.sqrt(self.hidden_size)
        hidden_states = hidden_states + self.sinusoids(input_ids.size(1), hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.lm_head(hidden_states)


def build(c):
    model = DecoderForCausalLM(max(c.vocab_size - 2, 1), c.d_model, c.num_heads, c.num_layers, c.d_ff)
    model.resize_token_embeddings(c.vocab_size)  # <|user|>, <|assistant|>
    return model


subject = Subject(
    kind="decoder",
    name="tied decoder with added tokens",
    build=build,
    forward=lambda model, tokens: model(tokens),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "tied": True,
        "output_bias": False,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
    },
)
