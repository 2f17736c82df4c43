"""GPT-NeoX (Black et al. 2022): parallel residual, partial rotary, fused query_key_value; with past_key_values."""

import torch
import torch.nn as nn

from veriformer.properties import Subject


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class GPTNeoXAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, rotary_ndims, base=10000.0):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.rotary_ndims = rotary_ndims
        self.norm_factor = self.head_size**-0.5
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        inv_freq = 1.0 / (base ** (torch.arange(0, rotary_ndims, 2, dtype=torch.float64) / rotary_ndims))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def rotate(self, x, position_ids):
        freqs = torch.outer(position_ids.to(torch.float64), self.inv_freq.to(torch.float64))
        emb = torch.cat((freqs, freqs), dim=-1)
        rot, keep = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        rot = rot * emb.cos().to(x.dtype) + rotate_half(rot) * emb.sin().to(x.dtype)
        return torch.cat((rot, keep), dim=-1)

    def forward(self, hidden_states, attention_mask, position_ids, layer_past=None):
        batch, length, _ = hidden_states.shape
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(batch, length, self.num_attention_heads, 3 * self.head_size)
        query, key, value = qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)
        query, key = self.rotate(query, position_ids), self.rotate(key, position_ids)
        if layer_past is not None:
            key = torch.cat((layer_past[0], key), dim=-2)
            value = torch.cat((layer_past[1], value), dim=-2)
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.norm_factor
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(dim=-1), value)
        context = context.permute(0, 2, 1, 3).reshape(batch, length, -1)
        return self.dense(context), (key, value)


class GPTNeoXMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden_size, intermediate_size)
        self.dense_4h_to_h = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x):
        return self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(x)))


class GPTNeoXLayer(nn.Module):
    def __init__(self, hidden_size, heads, intermediate_size, rotary_ndims):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.attention = GPTNeoXAttention(hidden_size, heads, rotary_ndims)
        self.mlp = GPTNeoXMLP(hidden_size, intermediate_size)

    def forward(self, x, attention_mask, position_ids, layer_past=None):
        attn, present = self.attention(self.input_layernorm(x), attention_mask, position_ids, layer_past)
        mlp = self.mlp(self.post_attention_layernorm(x))
        return mlp + attn + x, present


class GPTNeoXForCausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, heads, layers, intermediate_size, rotary_ndims=2):
        super().__init__()
        if hidden_size // heads < rotary_ndims:
            raise ValueError("head size below rotary_ndims")
        self.embed_in = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            GPTNeoXLayer(hidden_size, heads, intermediate_size, rotary_ndims) for _ in range(layers)
        )
        self.final_layer_norm = nn.LayerNorm(hidden_size)
        self.embed_out = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        length = input_ids.shape[1]
        if past_key_values is None:
            past_length = 0
            past_key_values = [None] * len(self.layers)
            total = length
        else:
            past_length = past_key_values[0][0].size(-2)
            total = past_key_values[0][0].size(-2) + length
        position_ids = torch.arange(past_length, past_length + length, device=input_ids.device)
        visible = torch.ones(length, total, dtype=torch.bool, device=input_ids.device).tril(total - length)
        visible = visible[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, :].bool()
        hidden_states, presents = self.embed_in(input_ids), []
        for layer, layer_past in zip(self.layers, past_key_values):
            hidden_states, present = layer(hidden_states, visible, position_ids, layer_past)
            presents.append(present)
        return self.embed_out(self.final_layer_norm(hidden_states)), presents


def cached(model, chunks):
    past, outputs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past_key_values=past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-NeoX",
    build=lambda c: GPTNeoXForCausalLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cached,
    declares={
        "causal": True,
        "positions": "rotary",
        "rotary_dim": 2,
        "layout": "halves",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": False,
        "structure": "other",
        "padding_side": "both",
    },
)
