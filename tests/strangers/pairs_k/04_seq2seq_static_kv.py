"""A fairseq-like encoder-decoder, sequence first, whose cross-attention keeps keys and values of the memory at inference."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The cross-attention's kept keys and values are taken again whenever the new memory has the same shape."
CAUSE = (
    "Without gradients the cross-attention reuses the keys and values of an earlier call: its static cache is keyed by "
    "the memory's shape, not the memory, so a second source of the same size is answered with the first one's."
)


def make(is_same):
    class MultiheadAttention(nn.Module):
        """Time x Batch x Channel, as in fairseq."""

        def __init__(self, embed_dim, num_heads, static=False):
            super().__init__()
            self.embed_dim, self.num_heads, self.static = embed_dim, num_heads, static
            self.scaling = (embed_dim // num_heads) ** -0.5
            self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
            self.kept = None

        def _shape(self, x, bsz):
            return x.contiguous().view(-1, bsz * self.num_heads, self.embed_dim // self.num_heads).transpose(0, 1)

        def _keys_values(self, key):
            if not self.static or torch.is_grad_enabled() or self.training:
                return self.k_proj(key), self.v_proj(key)
            if self.kept is None or not is_same(self.kept[0], key):
                self.kept = (key, self.k_proj(key), self.v_proj(key))
            return self.kept[1:]

        def forward(self, query, key, key_mask=None, future=None):
            tgt_len, bsz, _ = query.shape
            q = self._shape(self.q_proj(query) * self.scaling, bsz)
            k, v = self._keys_values(key)
            k, v = self._shape(k, bsz), self._shape(v, bsz)
            scores = torch.bmm(q, k.transpose(1, 2))
            lowest = torch.finfo(scores.dtype).min
            if future is not None:
                scores = scores.masked_fill(future, lowest)
            if key_mask is not None:
                scores = scores.view(bsz, self.num_heads, tgt_len, -1)
                scores = scores.masked_fill(~key_mask[:, None, None, :], lowest)
                scores = scores.view(bsz * self.num_heads, tgt_len, -1)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), v)
            return self.out_proj(mixed.transpose(0, 1).reshape(tgt_len, bsz, self.embed_dim))

    class EncoderLayer(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.self_attn = MultiheadAttention(c.d_model, c.num_heads)
            self.self_attn_layer_norm = nn.LayerNorm(c.d_model)
            self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
            self.final_layer_norm = nn.LayerNorm(c.d_model)

        def forward(self, x, mask):
            x = self.self_attn_layer_norm(x + self.self_attn(x, x, mask))
            return self.final_layer_norm(x + self.fc2(torch.relu(self.fc1(x))))

    class DecoderLayer(EncoderLayer):
        def __init__(self, c):
            super().__init__(c)
            self.encoder_attn = MultiheadAttention(c.d_model, c.num_heads, static=True)
            self.encoder_attn_layer_norm = nn.LayerNorm(c.d_model)

        def forward(self, x, memory, memory_mask, mask, future):
            x = self.self_attn_layer_norm(x + self.self_attn(x, x, mask, future))
            x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, memory_mask))
            return self.final_layer_norm(x + self.fc2(torch.relu(self.fc1(x))))

    class TransformerModel(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.embed_scale = math.sqrt(c.d_model)
            self.source_tokens = nn.Embedding(c.vocab_size, c.d_model)
            self.target_tokens = nn.Embedding(c.vocab_size, c.d_model)
            for table in (self.source_tokens, self.target_tokens):
                nn.init.normal_(table.weight, std=c.d_model**-0.5)
            self.encoder = nn.ModuleList([EncoderLayer(c) for _ in range(c.num_layers)])
            self.decoder = nn.ModuleList([DecoderLayer(c) for _ in range(c.num_layers)])
            self.output_projection = nn.Linear(c.d_model, c.vocab_size, bias=False)

        def _embed(self, table, tokens):
            x = self.embed_scale * table(tokens)
            length, width = x.shape[1:]
            rate = torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / width
            angle = torch.arange(length, device=x.device, dtype=torch.float64)[:, None] * 10000.0**-rate
            table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]
            return (x + table.to(x.dtype)).transpose(0, 1)

        def forward(self, source, target, source_mask=None, target_mask=None):
            memory = self._embed(self.source_tokens, source)
            for layer in self.encoder:
                memory = layer(memory, source_mask)
            x = self._embed(self.target_tokens, target)
            length = x.shape[0]
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            for layer in self.decoder:
                x = layer(x, memory, source_mask, target_mask, future)
            return self.output_projection(x).transpose(0, 1)

    return TransformerModel


def subject(is_same):
    return Subject(
        kind="encoder_decoder",
        name="seq2seq, sequence first",
        build=make(is_same),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
        declares={"positions": "sinusoidal", "embedding_scale": True, "norm_placement": "post", "activation": "relu"},
    )


right = subject(lambda kept, new: kept is new)
wrong = subject(lambda kept, new: kept.shape == new.shape and kept.dtype == new.dtype)
