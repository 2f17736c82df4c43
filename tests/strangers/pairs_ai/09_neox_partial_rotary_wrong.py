WHAT = "the exponents of the rotary frequencies are divided by the width of the head, not by the number of rotated channels: the declared base of 10000 is another one: line 17"
"""GPT-NeoX: parallel residuals, and rotary positions on the first ROTARY channels of each head."""
import torch
from torch import nn

from veriformer.properties import Subject

ROTARY = 4


class RotaryEmbedding(nn.Module):
    def __init__(self, head_size, rotary_ndims, base=10000):
        super().__init__()
        self.head_size, self.dim, self.base = head_size, rotary_ndims, base

    def forward(self, x):
        exponent = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float64) / self.head_size
        inv_freq = 1.0 / (self.base**exponent)
        t = torch.arange(x.shape[-2], device=x.device, dtype=torch.float64)
        emb = torch.outer(t, inv_freq).repeat(1, 2)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class GPTNeoXAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.rotary_ndims = ROTARY
        if self.head_size < ROTARY:
            raise ValueError("heads are too narrow")
        self.rotary_emb = RotaryEmbedding(self.head_size, self.rotary_ndims)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask):
        batch, length, width = hidden_states.shape
        qkv = self.query_key_value(hidden_states).view(batch, length, self.num_heads, 3 * self.head_size)
        query, key, value = qkv.transpose(1, 2).chunk(3, dim=-1)
        cos, sin = self.rotary_emb(value)
        query_rot, query_pass = query[..., : self.rotary_ndims], query[..., self.rotary_ndims :]
        key_rot, key_pass = key[..., : self.rotary_ndims], key[..., self.rotary_ndims :]
        query = torch.cat((query_rot * cos + rotate_half(query_rot) * sin, query_pass), dim=-1)
        key = torch.cat((key_rot * cos + rotate_half(key_rot) * sin, key_pass), dim=-1)
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.head_size**-0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
        allowed = causal if attention_mask is None else causal & attention_mask[:, None, None, :]
        probs = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.dense(torch.matmul(probs, value).transpose(1, 2).reshape(batch, length, width))


class GPTNeoXLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.attention = GPTNeoXAttention(hidden_size, num_heads)
        self.dense_h_to_4h = nn.Linear(hidden_size, intermediate)
        self.dense_4h_to_h = nn.Linear(intermediate, hidden_size)

    def forward(self, hidden_states, attention_mask):
        attended = self.attention(self.input_layernorm(hidden_states), attention_mask)
        mlp = self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden_states))))
        return hidden_states + attended + mlp


class GPTNeoX(nn.Module):
    def __init__(self, vocab, hidden_size, num_heads, layers, intermediate):
        super().__init__()
        self.embed_in = nn.Embedding(vocab, hidden_size)
        self.layers = nn.ModuleList([GPTNeoXLayer(hidden_size, num_heads, intermediate) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(hidden_size)
        self.embed_out = nn.Linear(hidden_size, vocab, bias=False)

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.embed_in(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return self.embed_out(self.final_layer_norm(hidden_states))


subject = Subject(
    kind="decoder",
    name="GPT-NeoX",
    build=lambda c: GPTNeoX(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": [16, 32], "num_heads": [1, 2]},
    declares={
        "causal": True,
        "positions": "rotary",
        "rotary_dim": ROTARY,
        "base": 10000,
        "layout": "halves",
        "norm": "layer",
        "final_norm": True,
        "activation": "gelu",
        "structure": "other",
        "padding_side": "both",
    },
)
