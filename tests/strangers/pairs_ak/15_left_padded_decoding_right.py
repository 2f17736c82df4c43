"""Decoder for batches of prompts of unequal length, padded on either side: positions are counted over real tokens."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class DecoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.num_heads = num_heads
        self.input_layernorm = nn.LayerNorm(d_model)
        self.post_attention_layernorm = nn.LayerNorm(d_model)
        self.q_proj, self.k_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)

    def forward(self, hidden, allowed, past):
        h = self.input_layernorm(hidden)
        q, k, v = self.split(self.q_proj(h)), self.split(self.k_proj(h)), self.split(self.v_proj(h))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        hidden = hidden + self.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.fc2(F.gelu(self.fc1(self.post_attention_layernorm(hidden))))
        return hidden, (k, v)


class Decoder(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, max_len):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, d_model)
        self.embed_positions = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList([DecoderLayer(d_model, num_heads, d_ff) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        past_length = 0 if past_key_values is None else past_key_values[0][0].size(2)
        batch, new = input_ids.shape
        total = past_length + new
        if attention_mask is None:
            attention_mask = input_ids.new_ones(batch, total, dtype=torch.bool)
        attention_mask = attention_mask.bool()

        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        if past_length:
            position_ids = position_ids[:, past_length:]

        square = torch.ones(total, total, dtype=torch.bool, device=input_ids.device)
        allowed = square.tril() & attention_mask[:, None, :] | torch.eye(total, dtype=torch.bool, device=input_ids.device)
        allowed = allowed[:, None, past_length:]

        hidden = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        presents = []
        for i, layer in enumerate(self.layers):
            hidden, present = layer(hidden, allowed, None if past_key_values is None else past_key_values[i])
            presents.append(present)
        return self.lm_head(self.norm(hidden)), presents


def cached(model, chunks, attention_mask=None):
    past, seen, outputs = None, 0, []
    for chunk in chunks:
        seen += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :seen]
        logits, past = model(chunk, mask, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="decoder with padded prompts",
    build=lambda c: Decoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cached,
    declares={
        "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu", "tied": False, "padding_side": "both",
    },
)
