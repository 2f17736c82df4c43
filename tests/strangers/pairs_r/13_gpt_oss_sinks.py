"""gpt-oss in small: every head has a learnt sink, one more logit in the softmax that carries no value."""

import torch
from torch import nn

from veriformer.properties import Subject


def rotate(x):
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = speed * torch.arange(x.shape[-2], device=x.device)[:, None]
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.split(half, dim=-1)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)


def eager_attention_forward(module, query, key, value):
    attn_weights = query @ key.transpose(2, 3) * module.scaling
    length = query.shape[2]
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    attn_weights = attn_weights.masked_fill(future, float("-inf"))
    sinks = module.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, length, 1)
    probs = torch.cat([attn_weights, sinks.to(attn_weights.dtype)], dim=-1).softmax(dim=-1)
    return module.drop_sink(probs) @ value


class GptOssAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.num_heads, self.head_dim = c.num_heads, c.d_model // c.num_heads
        if self.head_dim % 2:
            raise ValueError("head_dim must be even")
        self.scaling = self.head_dim**-0.5
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
        self.sinks = nn.Parameter(torch.randn(c.num_heads))

    def drop_sink(self, probs):
        return probs[..., :-1]

    def forward(self, hidden_states):
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        q = rotate(self.q_proj(hidden_states).view(shape).transpose(1, 2))
        k = rotate(self.k_proj(hidden_states).view(shape).transpose(1, 2))
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        return self.o_proj(eager_attention_forward(self, q, k, v).transpose(1, 2).flatten(2))


class GptOssAttentionSinkFirst(GptOssAttention):
    def drop_sink(self, probs):
        return probs[..., 1:]


class GptOssBlock(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.self_attn = attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.gate, self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        h = self.post_attention_layernorm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class GptOss(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([GptOssBlock(c, attention) for _ in range(c.num_layers)])
        self.norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def gpt_oss(attention):
    return Subject(
        kind="decoder",
        name="gpt-oss",
        build=lambda c: GptOss(c, attention),
        forward=lambda model, tokens: model(tokens),
        declares={"sink": True, "positions": "rotary", "norm": "rms", "norm_placement": "pre", "activation": "swiglu"},
    )


right, wrong = gpt_oss(GptOssAttention), gpt_oss(GptOssAttentionSinkFirst)
WHAT = "The sink's column is appended behind the keys, but after the softmax the first column is dropped as if it had been put in front."
CAUSE = (
    "Slicing probs[..., 1:] removes the weight of key 0 and moves every weight one to the left: value j is weighed with key j+1's weight, "
    "and the last value of the sequence, in the future of all others, gets the sink's."
)
