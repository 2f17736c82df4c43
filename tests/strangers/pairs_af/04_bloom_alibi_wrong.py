WHAT = "baddbmm scales its additive input too (line 33: beta is 1/sqrt(d_head), not 1), so that every ALiBi slope is sqrt(d_head) times too flat."
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def build_slopes(num_heads):
    closest = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(closest) - 3)))
    slopes = [base ** (i + 1) for i in range(closest)]
    if closest != num_heads:
        extra = 2.0 ** (-(2.0 ** -(math.log2(2 * closest) - 3)))
        slopes += [extra ** (2 * i + 1) for i in range(num_heads - closest)]
    return torch.tensor(slopes, dtype=torch.float64)


def build_alibi_tensor(slopes, batch, length, dtype, device):
    positions = torch.arange(length, device=device, dtype=torch.float64)
    alibi = slopes.to(device)[:, None, None] * positions[None, None, :]
    return alibi.to(dtype).repeat(batch, 1, 1)


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.beta = self.inv_norm_factor
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, alibi, mask):
        batch, length, width = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(batch, length, self.num_heads, 3, self.head_dim)
        query, key, value = (fused[..., i, :].transpose(1, 2).reshape(-1, length, self.head_dim) for i in range(3))
        scores = torch.baddbmm(alibi, query, key.transpose(1, 2), beta=self.beta, alpha=self.inv_norm_factor)
        scores = scores.view(batch, self.num_heads, length, length)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1).view(-1, length, length)
        context = torch.bmm(probs, value).view(batch, self.num_heads, length, self.head_dim)
        return self.dense(context.transpose(1, 2).reshape(batch, length, width))


class BloomBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, d_ff):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = BloomAttention(hidden_size, num_heads)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.dense_h_to_4h = nn.Linear(hidden_size, d_ff)
        self.dense_4h_to_h = nn.Linear(d_ff, hidden_size)

    def forward(self, x, alibi, mask):
        x = x + self.self_attention(self.input_layernorm(x), alibi, mask)
        h = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)), approximate="tanh")
        return x + self.dense_4h_to_h(h)


class Bloom(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_layers, d_ff):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.h = nn.ModuleList([BloomBlock(hidden_size, num_heads, d_ff) for _ in range(num_layers)])
        self.ln_f = nn.LayerNorm(hidden_size)
        self.slopes = build_slopes(num_heads)

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        x = self.word_embeddings(input_ids)
        alibi = build_alibi_tensor(self.slopes, batch, length, x.dtype, x.device)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)[None, None]
        if attention_mask is not None:
            mask = mask | ~attention_mask[:, None, None, :]
        for block in self.h:
            x = block(x, alibi, mask)
        return F.linear(self.ln_f(x), self.word_embeddings.weight)


subject = Subject(
    kind="decoder",
    name="bloom",
    build=lambda c: Bloom(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": True,
        "padding_side": "both",
    },
)
