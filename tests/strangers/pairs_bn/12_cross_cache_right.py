"""Encoder-decoder, BART-like, with caches kept on the attention modules while serving."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.past = None

    def reset(self):
        self.past = None

    def _split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def _merge(self, q, k, v, mask):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x, memory, mask=None):
        return self._merge(
            self._split(self.q_proj(x)), self._split(self.k_proj(memory)), self._split(self.v_proj(memory)), mask
        )

    def step_self(self, x):
        k, v = self._split(self.k_proj(x)), self._split(self.v_proj(x))
        if self.past is not None:
            k, v = torch.cat([self.past[0], k], 2), torch.cat([self.past[1], v], 2)
        self.past = k, v
        new, total = x.shape[1], k.shape[2]
        mask = torch.ones(new, total, dtype=torch.bool, device=x.device).tril(total - new)
        return self._merge(self._split(self.q_proj(x)), k, v, mask)

    def step_cross(self, x, memory):
        fits = (
            self.past is not None
            and self.past[0].shape[0] == memory.shape[0]
            and self.past[0].shape[2] == memory.shape[1]
            and self.past[0].dtype == memory.dtype
        )
        if not fits:  # keys and values of the source are computed once
            self.past = self._split(self.k_proj(memory)), self._split(self.v_proj(memory))
        return self._merge(self._split(self.q_proj(x)), *self.past, None)


class FeedForward(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.self_attn, self.ffn = Attention(dim, heads), FeedForward(dim, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, mask):
        x = self.norm1(x + self.self_attn(x, x, mask))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.self_attn, self.cross_attn = Attention(dim, heads), Attention(dim, heads)
        self.ffn = FeedForward(dim, hidden)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, memory, mask, memory_mask):
        x = self.norm1(x + self.self_attn(x, x, mask))
        x = self.norm2(x + self.cross_attn(x, memory, memory_mask))
        return self.norm3(x + self.ffn(x))

    def step(self, x, memory):
        x = self.norm1(x + self.self_attn.step_self(x))
        x = self.norm2(x + self.cross_attn.step_cross(x, memory))
        return self.norm3(x + self.ffn(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.source_positions = nn.Embedding(c.max_len, c.d_model)
        self.target_positions = nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def encode(self, source, mask=None):
        x = self.embed(source) + self.source_positions.weight[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x, mask)
        return x

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is not None:
            source_mask = source_mask[:, None, None, :]
        memory = self.encode(source, source_mask)
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            mask = mask & target_mask[:, None, None, :]
        x = self.embed(target) + self.target_positions.weight[:length]
        for layer in self.decoder:
            x = layer(x, memory, mask, source_mask)
        return self.lm_head(x)

    def reset_cache(self):
        for layer in self.decoder:
            layer.self_attn.reset()
            layer.cross_attn.reset()

    @torch.no_grad()
    def decode_chunks(self, source, chunks):
        self.reset_cache()
        memory, start, outputs = self.encode(source), 0, []
        for chunk in chunks:
            x = self.embed(chunk) + self.target_positions.weight[start : start + chunk.shape[1]]
            for layer in self.decoder:
                x = layer.step(x, memory)
            outputs.append(self.lm_head(x))
            start += chunk.shape[1]
        return outputs


subject = Subject(
    kind="encoder_decoder",
    name="served seq2seq",
    build=Seq2Seq,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    cache=lambda model, source, chunks: model.decode_chunks(source, chunks),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
        "tied": False,
    },
)
