"""DeBERTa-v2: disentangled attention, content to position and position to content, with logarithmic buckets."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, MAX_RELATIVE = 4, 16


def make_log_bucket_position(relative_pos, bucket_size, max_position):
    sign = torch.sign(relative_pos)
    mid = bucket_size // 2
    abs_pos = torch.where((relative_pos < mid) & (relative_pos > -mid), mid - 1, relative_pos.abs())
    spread = torch.log(torch.tensor((max_position - 1) / mid))
    log_pos = torch.ceil(torch.log(abs_pos.float() / mid) / spread * (mid - 1)).long() + mid
    return torch.where(abs_pos <= mid, relative_pos, log_pos * sign)


def build_relative_position(query_size, key_size):
    q_ids, k_ids = torch.arange(query_size), torch.arange(key_size)
    return make_log_bucket_position(q_ids[:, None] - k_ids[None, :], BUCKETS, MAX_RELATIVE)


class DisentangledSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.query_proj, self.key_proj, self.value_proj = (nn.Linear(dim, dim) for _ in range(3))

    def split(self, x):
        return x.view(*x.shape[:-1], self.heads, self.head_dim).transpose(-2, -3)

    def forward(self, hidden, mask, relative_pos, rel_embeddings):
        q, k, v = self.split(self.query_proj(hidden)), self.split(self.key_proj(hidden)), self.split(self.value_proj(hidden))
        scale = math.sqrt(self.head_dim * 3)
        scores = torch.matmul(q, k.transpose(-1, -2)) / scale
        scores = scores + self.disentangled_bias(q, k, relative_pos, rel_embeddings, scale)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(-1), v)
        return context.transpose(1, 2).flatten(2)

    def disentangled_bias(self, q, k, relative_pos, rel_embeddings, scale):
        span = BUCKETS
        pos_key = self.split(self.key_proj(rel_embeddings))
        pos_query = self.split(self.query_proj(rel_embeddings))
        shape = (*q.shape[:2], *relative_pos.shape)
        c2p_pos = torch.clamp(relative_pos + span, 0, span * 2 - 1)
        c2p = torch.gather(torch.matmul(q, pos_key.mT), -1, c2p_pos.expand(shape))
        p2c_pos = torch.clamp(-relative_pos + span, 0, span * 2 - 1)
        # row j of what is gathered belongs to key j, so that it is turned around
        p2c = torch.gather(torch.matmul(k, pos_query.mT), -1, p2c_pos.expand(shape)).transpose(-1, -2)
        return (c2p + p2c) / scale


class DebertaLayer(nn.Module):
    def __init__(self, dim, heads, inner):
        super().__init__()
        self.attention = DisentangledSelfAttention(dim, heads)
        self.attention_dense, self.attention_norm = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=1e-7)
        self.intermediate, self.output_dense = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.output_norm = nn.LayerNorm(dim, eps=1e-7)

    def forward(self, x, mask, relative_pos, rel_embeddings):
        x = self.attention_norm(x + self.attention_dense(self.attention(x, mask, relative_pos, rel_embeddings)))
        return self.output_norm(x + self.output_dense(nn.functional.gelu(self.intermediate(x))))


class DebertaV2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.embedding_norm = nn.LayerNorm(c.d_model, eps=1e-7)
        self.layers = nn.ModuleList([DebertaLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.rel_embeddings = nn.Embedding(BUCKETS * 2, c.d_model)
        self.rel_norm = nn.LayerNorm(c.d_model, eps=1e-7)

    def forward(self, tokens, mask=None):
        x = self.embedding_norm(self.word_embeddings(tokens))
        relative_pos = build_relative_position(tokens.shape[1], tokens.shape[1]).to(tokens.device)
        rel_embeddings = self.rel_norm(self.rel_embeddings.weight)
        for layer in self.layers:
            x = layer(x, mask, relative_pos, rel_embeddings)
        return x


subject = Subject(
    kind="encoder",
    name="DeBERTa-v2",
    build=DebertaV2,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (16,), "num_heads": (2,)},
    declares={
        "causal": False,
        "positions": "relative",
        "bidirectional": True,
        "attention_scale": 24**-0.5,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "both",
        "structure": "other",
    },
)
