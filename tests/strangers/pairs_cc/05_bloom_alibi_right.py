import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def build_slopes(heads):
    closest = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / closest) for i in range(1, closest + 1)]
    extra = [2.0 ** (-8.0 * i / (2 * closest)) for i in range(1, 2 * closest + 1, 2)]
    return slopes + extra[: heads - closest]


class BloomBlock(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(width, inner), nn.Linear(inner, width)

    def attention(self, hidden, alibi, allowed):
        b, t, _ = hidden.shape
        fused = self.query_key_value(hidden).view(b, t, self.num_heads, 3, self.head_dim)
        q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores * self.inv_norm_factor + alibi
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1).masked_fill(~allowed, 0.0)
        return self.dense(torch.matmul(probs, v).transpose(1, 2).reshape(b, t, -1))

    def forward(self, hidden, alibi, allowed):
        hidden = hidden + self.attention(self.input_layernorm(hidden), alibi, allowed)
        inner = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden)), approximate="tanh")
        return hidden + self.dense_4h_to_h(inner)


class Bloom(nn.Module):
    def __init__(self, vocab, width, heads, layers, inner):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width)
        self.word_embeddings_layernorm = nn.LayerNorm(width)
        self.h = nn.ModuleList(BloomBlock(width, heads, inner) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.word_embeddings.weight
        self.register_buffer("slopes", torch.tensor(build_slopes(heads)), persistent=False)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        alibi = self.slopes[:, None, None].to(hidden.dtype) * (place[None, :] - place[:, None]).to(hidden.dtype)
        allowed = (place[None, :] <= place[:, None])[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        for block in self.h:
            hidden = block(hidden, alibi, allowed)
        return self.lm_head(self.ln_f(hidden))


subject = Subject(
    kind="decoder",
    name="bloom",
    build=lambda c: Bloom(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "alibi", "slopes": "interleaved", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu_tanh", "bias": True, "tied": True, "padding_side": "both"},
)
