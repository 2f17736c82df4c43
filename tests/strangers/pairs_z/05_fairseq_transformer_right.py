"""The Transformer as fairseq has it: post-norm, sinusoidal positions, incremental decoding with static cross-attention."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

BOS = 1


class SinusoidalPositionalEmbedding(nn.Module):
    def __init__(self, embedding_dim):
        super().__init__()
        if embedding_dim % 2:
            raise ValueError("the width must be even")
        self.embedding_dim = embedding_dim

    def forward(self, length, offset, like):
        half = self.embedding_dim // 2
        freq = torch.exp(torch.arange(half, dtype=like.dtype, device=like.device) * -(math.log(10000.0) / half))
        pos = torch.arange(offset, offset + length, dtype=like.dtype, device=like.device)
        angles = pos[:, None] * freq[None, :]
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, encoder_decoder_attention=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.encoder_decoder_attention = encoder_decoder_attention
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.saved = None

    def reset(self):
        self.saved = None

    def _shape(self, t):
        return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def _keys_and_values(self, source, incremental):
        if not incremental:
            return self._shape(self.k_proj(source)), self._shape(self.v_proj(source))
        saved = self.saved
        if self.encoder_decoder_attention:
            # the memory does not change while decoding: project it once
            if saved is None or saved[0].size(0) != source.size(0):
                saved = self._shape(self.k_proj(source)), self._shape(self.v_proj(source))
        else:
            k, v = self._shape(self.k_proj(source)), self._shape(self.v_proj(source))
            saved = (k, v) if saved is None else (torch.cat([saved[0], k], 2), torch.cat([saved[1], v], 2))
        self.saved = saved
        return saved

    def forward(self, query, source, key_padding_mask=None, attn_mask=None, incremental=False):
        q = self._shape(self.q_proj(query)) * self.scaling
        k, v = self._keys_and_values(source, incremental)
        attn = q @ k.transpose(-2, -1)
        if attn_mask is not None:
            attn = attn.masked_fill(~attn_mask, float("-inf"))
        if key_padding_mask is not None:
            attn = attn.masked_fill(~key_padding_mask[:, None, None, :], float("-inf"))
        attn = F.softmax(attn, dim=-1) @ v
        return self.out_proj(attn.transpose(1, 2).reshape(query.size(0), query.size(1), -1))


class EncoderLayer(nn.Module):
    def __init__(self, d, heads, ffn):
        super().__init__()
        self.self_attn = MultiheadAttention(d, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, ffn), nn.Linear(ffn, d)
        self.final_layer_norm = nn.LayerNorm(d)

    def forward(self, x, padding):
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, padding))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class DecoderLayer(nn.Module):
    def __init__(self, d, heads, ffn):
        super().__init__()
        self.self_attn = MultiheadAttention(d, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d)
        self.encoder_attn = MultiheadAttention(d, heads, encoder_decoder_attention=True)
        self.encoder_attn_layer_norm = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, ffn), nn.Linear(ffn, d)
        self.final_layer_norm = nn.LayerNorm(d)

    def forward(self, x, memory, memory_mask, future, padding, incremental):
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, padding, future, incremental))
        x = self.encoder_attn_layer_norm(
            x + self.encoder_attn(x, memory, memory_mask, incremental=incremental)
        )
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class TransformerModel(nn.Module):
    def __init__(self, vocab, d, heads, layers, ffn):
        super().__init__()
        self.embed_scale = math.sqrt(d)
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.embed_positions = SinusoidalPositionalEmbedding(d)
        self.encoder = nn.ModuleList([EncoderLayer(d, heads, ffn) for _ in range(layers)])
        self.layers = nn.ModuleList([DecoderLayer(d, heads, ffn) for _ in range(layers)])
        self.output_projection = nn.Linear(d, vocab, bias=False)
        self.decoded = 0

    def encode(self, source, source_mask=None):
        x = self.embed_scale * self.src_embed(source)
        x = x + self.embed_positions(source.size(1), 0, x)
        for layer in self.encoder:
            x = layer(x, source_mask)
        return x

    def decode(self, target, memory, source_mask=None, target_mask=None, incremental=False):
        t, offset = target.size(1), self.decoded if incremental else 0
        x = self.embed_scale * self.tgt_embed(target)
        x = x + self.embed_positions(t, offset, x)
        future = torch.ones(t, offset + t, dtype=torch.bool, device=x.device).tril(offset)
        for layer in self.layers:
            x = layer(x, memory, source_mask, future, target_mask, incremental)
        if incremental:
            self.decoded += t
        return self.output_projection(x)

    def start_decoding(self):
        self.decoded = 0
        for layer in self.layers:
            layer.self_attn.reset()
            layer.encoder_attn.reset()

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)


@torch.no_grad()
def cache(model, source, chunks):
    memory = model.encode(source)
    model.start_decoding()
    return torch.cat([model.decode(chunk, memory, incremental=True) for chunk in chunks], dim=1)


@torch.no_grad()
def generate(model, source, steps, use_cache):
    memory = model.encode(source)
    target = torch.full((source.size(0), 1), BOS, dtype=torch.long, device=source.device)
    model.start_decoding()
    for _ in range(steps):
        if use_cache:
            logits = model.decode(target[:, -1:], memory, incremental=True)
        else:
            logits = model.decode(target, memory)
        target = torch.cat([target, logits[:, -1:].argmax(-1)], dim=1)
    return target


subject = Subject(
    kind="encoder_decoder",
    name="fairseq Transformer",
    build=lambda c: TransformerModel(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(
        source, target, source_mask, target_mask
    ),
    cache=cache,
    generate=generate,
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "layout": "halves",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
        "output_bias": False,
        "tied": False,
        "padding_side": "right",
    },
)
