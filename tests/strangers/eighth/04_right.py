"""A fairseq-like language model: post-LN, sinusoidal positions, incremental state that beam search reorders."""

import math
import uuid

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def Embedding(num_embeddings, embedding_dim):
    m = nn.Embedding(num_embeddings, embedding_dim)
    nn.init.normal_(m.weight, mean=0, std=embedding_dim**-0.5)
    return m


def Linear(in_features, out_features, bias=True):
    m = nn.Linear(in_features, out_features, bias)
    nn.init.xavier_uniform_(m.weight)
    if bias:
        nn.init.constant_(m.bias, 0.0)
    return m


class SinusoidalPositionalEmbedding(nn.Module):
    """Sines in the first half of the channels, cosines in the second."""

    def __init__(self, embedding_dim):
        super().__init__()
        self.embedding_dim = embedding_dim

    def forward(self, start, length, like):
        half = self.embedding_dim // 2
        freq = torch.exp(
            torch.arange(half, dtype=torch.float64, device=like.device) * -(2 * math.log(10000.0) / self.embedding_dim)
        )
        pos = torch.arange(start, start + length, dtype=torch.float64, device=like.device)
        angles = pos.unsqueeze(1) * freq.unsqueeze(0)
        return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj = Linear(embed_dim, embed_dim)
        self.v_proj = Linear(embed_dim, embed_dim)
        self.q_proj = Linear(embed_dim, embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)
        self._incremental_state_id = str(uuid.uuid4())

    def _split(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x, attn_mask, incremental_state=None):
        bsz, tgt_len, embed_dim = x.size()
        q = self._split(self.q_proj(x) * self.scaling)
        k = self._split(self.k_proj(x))
        v = self._split(self.v_proj(x))
        if incremental_state is not None:
            saved = incremental_state.get(self._incremental_state_id)
            if saved is not None:
                k = torch.cat([saved[0], k], dim=2)
                v = torch.cat([saved[1], v], dim=2)
            incremental_state[self._incremental_state_id] = (k, v)
        attn_weights = torch.matmul(q, k.transpose(2, 3)) + attn_mask
        attn_probs = F.dropout(F.softmax(attn_weights, dim=-1), p=self.dropout, training=self.training)
        attn = torch.matmul(attn_probs, v).transpose(1, 2).contiguous().view(bsz, tgt_len, embed_dim)
        return self.out_proj(attn)

    def reorder_incremental_state(self, incremental_state, new_order):
        saved = incremental_state.get(self._incremental_state_id)
        if saved is not None:
            key, value = saved
            incremental_state[self._incremental_state_id] = (key.index_select(0, new_order), value.index_select(0, new_order))


class TransformerDecoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim, dropout):
        super().__init__()
        self.dropout = dropout
        self.self_attn = MultiheadAttention(embed_dim, num_heads, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = Linear(embed_dim, ffn_dim)
        self.fc2 = Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, attn_mask, incremental_state=None):
        residual = x
        x = self.self_attn(x, attn_mask, incremental_state)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.self_attn_layer_norm(residual + x)

        residual = x
        x = F.relu(self.fc1(x))
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.fc2(x)
        x = F.dropout(x, p=self.dropout, training=self.training)
        return self.final_layer_norm(residual + x)


class TransformerLanguageModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_layers, num_heads, ffn_dim, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.embed_scale = math.sqrt(embed_dim)
        self.embed_tokens = Embedding(vocab_size, embed_dim)
        self.embed_positions = SinusoidalPositionalEmbedding(embed_dim)
        self.layers = nn.ModuleList(
            [TransformerDecoderLayer(embed_dim, num_heads, ffn_dim, dropout) for _ in range(num_layers)]
        )

    def buffered_future_mask(self, past, length, like):
        mask = torch.full((length, past + length), float("-inf"), dtype=like.dtype, device=like.device)
        return torch.triu(mask, past + 1)

    def forward(self, prev_output_tokens, incremental_state=None):
        past = 0 if incremental_state is None else incremental_state.get("length", 0)
        length = prev_output_tokens.size(1)
        x = self.embed_scale * self.embed_tokens(prev_output_tokens)
        x = x + self.embed_positions(past, length, x)
        x = F.dropout(x, p=self.dropout, training=self.training)
        attn_mask = self.buffered_future_mask(past, length, x)
        for layer in self.layers:
            x = layer(x, attn_mask, incremental_state)
        if incremental_state is not None:
            incremental_state["length"] = past + length
        return F.linear(x, self.embed_tokens.weight)

    def reorder_incremental_state(self, incremental_state, new_order):
        for module in self.modules():
            if module is not self and hasattr(module, "reorder_incremental_state"):
                module.reorder_incremental_state(incremental_state, new_order)


def incremental(model, chunks, reorder=None):
    state, outs = {}, []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            order = torch.as_tensor(reorder, dtype=torch.long, device=chunk.device)
            model.reorder_incremental_state(state, order)
        outs.append(model(chunk, state))
    return torch.cat(outs, dim=1)


@torch.no_grad()
def greedy(model, tokens, steps, use_cache):
    state = {} if use_cache else None
    feed = tokens
    for _ in range(steps):
        logits = model(feed, state)
        step = logits[:, -1, :].argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, step], dim=1)
        feed = step if use_cache else tokens
    return tokens


subject = Subject(
    kind="decoder",
    name="fairseq lm",
    build=lambda c: TransformerLanguageModel(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, tokens: m(tokens),
    cache=incremental,
    generate=greedy,
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "layout": "halves",
        "base": 10000.0,
        "beyond_max_len": "works",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "norm_bias": True,
        "final_norm": False,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "attention_scale": "1/sqrt(d_head)",
        "shared_layers": False,
        "structure": "textbook",
        "cached_chunks": True,
        "memory": "quadratic",
    },
)
