WHAT = "baddbmm scales the ALiBi bias along with the scores (beta=inv_norm instead of beta=1): the slopes are 1/sqrt(d_head) times the published ones (line 45)."
"""BLOOM: ALiBi by baddbmm, a norm behind the embedding, tied head."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def get_slopes(n):
    """The slopes of the ALiBi authors, those of no power of two interleaved."""
    closest = 2 ** math.floor(math.log2(n))
    base = 2 ** (-(2 ** -(math.log2(closest) - 3)))
    slopes = [base**i for i in range(1, closest + 1)]
    if closest != n:
        extra = 2 ** (-(2 ** -(math.log2(2 * closest) - 3)))
        slopes += [extra**i for i in range(1, 2 * (n - closest) + 1, 2)]
    return slopes


def build_alibi_tensor(attention_mask, num_heads, dtype):
    """[B * H, 1, S]: slope times the position of the key; what depends on the query alone is no matter to a softmax."""
    slopes = torch.tensor(get_slopes(num_heads), dtype=dtype, device=attention_mask.device)
    arange = ((attention_mask.long().cumsum(dim=-1) - 1) * attention_mask.long())[:, None, :]
    alibi = slopes[:, None] * arange.to(dtype)
    return alibi.reshape(attention_mask.shape[0] * num_heads, 1, attention_mask.shape[1])


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.num_heads, self.head_dim = n_head, hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, alibi, hidden):
        batch, length, _ = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(batch, length, self.num_heads, 3, self.head_dim)
        q = fused[..., 0, :].transpose(1, 2).reshape(batch * self.num_heads, length, self.head_dim)
        k = fused[..., 1, :].permute(0, 2, 3, 1).reshape(batch * self.num_heads, self.head_dim, length)
        v = fused[..., 2, :].transpose(1, 2).reshape(batch * self.num_heads, length, self.head_dim)
        scores = torch.baddbmm(alibi.expand(-1, length, -1), q, k, beta=self.inv_norm_factor, alpha=self.inv_norm_factor)
        scores = scores.view(batch, self.num_heads, length, length)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1).view(batch * self.num_heads, length, length)
        context = torch.bmm(probs, v).view(batch, self.num_heads, length, self.head_dim)
        return self.dense(context.transpose(1, 2).reshape(batch, length, -1))


class BloomBlock(nn.Module):
    def __init__(self, hidden_size, n_head, inner):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = BloomAttention(hidden_size, n_head)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.dense_h_to_4h = nn.Linear(hidden_size, inner)
        self.dense_4h_to_h = nn.Linear(inner, hidden_size)

    def forward(self, hidden_states, alibi, hidden):
        hidden_states = hidden_states + self.self_attention(self.input_layernorm(hidden_states), alibi, hidden)
        inner = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden_states)), approximate="tanh")
        return hidden_states + self.dense_4h_to_h(inner)


class Bloom(nn.Module):
    def __init__(self, vocab_size, hidden_size, n_head, n_layer, inner):
        super().__init__()
        self.num_heads = n_head
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(hidden_size)
        self.h = nn.ModuleList([BloomBlock(hidden_size, n_head, inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.word_embeddings.weight

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        length = input_ids.shape[1]
        hidden_states = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        alibi = build_alibi_tensor(attention_mask, self.num_heads, hidden_states.dtype)
        future = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        hidden = future[None, None] | ~attention_mask.bool()[:, None, None, :]
        for block in self.h:
            hidden_states = block(hidden_states, alibi, hidden)
        return self.lm_head(self.ln_f(hidden_states))


subject = Subject(
    kind="decoder",
    name="BLOOM",
    build=lambda c: Bloom(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": True,
        "positions": "alibi",
        "slopes": "interleaved",
        "attention_scale": "1/sqrt(d_head)",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "padding_side": "both",
    },
)
