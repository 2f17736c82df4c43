"""GPT-NeoX: rotary positions on the first channels of each head; sequential residuals; query_key_value in one map."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

ROTARY_NDIMS = 4


class NeoXConfig:
    def __init__(self, **kw):
        self.rotary_ndims = ROTARY_NDIMS
        self.rotary_emb_base = 10000
        self.layer_norm_eps = 1e-5
        self.__dict__.update(kw)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, seq_len):
        exponents = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float64) / self.dim
        inv_freq = 1.0 / self.base**exponents
        t = torch.arange(seq_len, device=x.device, dtype=torch.float64)
        freqs = torch.einsum("i,j->ij", t, inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class GPTNeoXAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // config.num_attention_heads
        self.rotary_ndims = config.rotary_ndims
        self.rotary_emb = RotaryEmbedding(config.rotary_ndims, config.rotary_emb_base)
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, attention_mask):
        batch, length, _ = hidden_states.shape
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(batch, length, self.num_heads, 3 * self.head_size).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)

        query_rot, query_pass = query[..., : self.rotary_ndims], query[..., self.rotary_ndims :]
        key_rot, key_pass = key[..., : self.rotary_ndims], key[..., self.rotary_ndims :]
        cos, sin = self.rotary_emb(value, seq_len=length)
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
        query = torch.cat((query_rot, query_pass), dim=-1)
        key = torch.cat((key_rot, key_pass), dim=-1)

        scores = torch.matmul(query, key.transpose(-1, -2)) / self.head_size**0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
        visible = causal if attention_mask is None else causal & attention_mask[:, None, None, :]
        scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
        out = torch.matmul(F.softmax(scores, dim=-1), value)
        return self.dense(out.transpose(1, 2).reshape(batch, length, -1))


class GPTNeoXLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = GPTNeoXAttention(config)
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states, attention_mask):
        hidden_states = hidden_states + self.attention(self.input_layernorm(hidden_states), attention_mask)
        mlp = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden_states))))
        return hidden_states + mlp


class GPTNeoXForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([GPTNeoXLayer(config) for _ in range(config.num_hidden_layers)])
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        hidden_states = self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return self.embed_out(self.final_layer_norm(hidden_states))


def build(c):
    return GPTNeoXForCausalLM(
        NeoXConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            num_attention_heads=c.num_heads,
            num_hidden_layers=c.num_layers,
            intermediate_size=c.d_ff,
        )
    )


subject = Subject(
    kind="decoder",
    name="gpt-neox",
    build=build,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    embed=lambda m, embeddings, attention_mask=None: m(None, attention_mask, embeddings),
    domain={"d_model": (16, 32), "num_heads": (1, 2)},  # heads of 8 channels and more, 4 of them rotated
    declares={
        "causal": True,
        "positions": "rotary",
        "rotary_dim": ROTARY_NDIMS,
        "layout": "halves",
        "base": 10000,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": False,
        "embedding_scale": False,
        "attention_scale": "1/sqrt(d_head)",
        "memory": "quadratic",
        "padding_side": "both",
        "structure": "textbook",
    },
)
