"""BLOOM: ALiBi on the keys' own positions, heads outermost in the fused matrix, normed embeddings, tied."""
import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


def build_alibi_tensor(attention_mask, num_heads, dtype):
    batch, length = attention_mask.shape
    closest = 2 ** math.floor(math.log2(num_heads))
    base = 2 ** (-(2 ** -(math.log2(closest) - 3)))
    powers = torch.arange(1, 1 + closest, device=attention_mask.device, dtype=torch.float64)
    slopes = torch.pow(base, powers)
    if closest != num_heads:
        extra = 2 ** (-(2 ** -(math.log2(2 * closest) - 3)))
        rest = min(closest, num_heads - closest)
        powers = torch.arange(1, 1 + 2 * rest, 2, device=attention_mask.device, dtype=torch.float64)
        slopes = torch.cat([slopes, torch.pow(extra, powers)])
    places = ((attention_mask.cumsum(-1) - 1) * attention_mask)[:, None, :]
    alibi = slopes[:, None] * places.double()
    return alibi.reshape(batch * num_heads, 1, length).to(dtype)


def bloom_gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x)))


class BloomAttention(nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.beta, self.inv_norm = 1.0, 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.attention_dropout = nn.Dropout(dropout)

    def forward(self, x, residual, alibi, hidden_mask):
        b, t, d = x.shape
        fused = self.query_key_value(x).view(b, t, self.heads, 3, self.head_dim)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q = q.transpose(1, 2).reshape(b * self.heads, t, self.head_dim)
        k = k.permute(0, 2, 3, 1).reshape(b * self.heads, self.head_dim, t)
        v = v.transpose(1, 2).reshape(b * self.heads, t, self.head_dim)
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=self.beta, alpha=self.inv_norm)
        scores = scores.view(b, self.heads, t, t)
        scores = torch.masked_fill(scores, hidden_mask, torch.finfo(scores.dtype).min)
        probs = self.attention_dropout(scores.softmax(-1)).view(b * self.heads, t, t)
        context = torch.bmm(probs, v).view(b, self.heads, t, self.head_dim).permute(0, 2, 1, 3).reshape(b, t, d)
        return self.dense(context) + residual


class BloomBlock(nn.Module):
    def __init__(self, hidden, heads, ffn, dropout):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.self_attention = BloomAttention(hidden, heads, dropout)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x, alibi, hidden_mask):
        x = self.self_attention(self.input_layernorm(x), x, alibi, hidden_mask)
        return x + self.dense_4h_to_h(bloom_gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))


class Bloom(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.word_embeddings_layernorm = nn.LayerNorm(c.d_model)
        self.h = nn.ModuleList([BloomBlock(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.word_embeddings.weight

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        attention_mask = attention_mask.long()
        x = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        alibi = build_alibi_tensor(attention_mask, self.heads, x.dtype)
        t = input_ids.shape[1]
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        hidden_mask = future[None, None] | (attention_mask == 0)[:, None, None, :]
        for block in self.h:
            x = block(x, alibi, hidden_mask)
        return self.lm_head(self.ln_f(x))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="BLOOM", build=Bloom, forward=forward,
    declares={
        "causal": True, "positions": "alibi", "slopes": "interleaved", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "gelu_tanh", "bias": True, "output_bias": False,
        "tied": True, "padding_side": "both", "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "works",
        "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=Bloom, forward=forward)
