"""An encoder-decoder with learned positions; its decoder goes on from a cache, the memory's keys made once."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x):
        return self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def forward(self, x, keys_values, allowed):
        k, v = keys_values
        scores = self.split(self.q_proj(x)) @ k.transpose(-1, -2) / k.size(-1) ** 0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c.d_model, c.num_heads)
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(2))
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, allowed):
        x = self.norms[0](x + self.self_attn(x, self.self_attn.keys_values(x), allowed))
        return self.norms[1](x + self.fc2(F.relu(self.fc1(x))))


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.cross_attn = Attention(c.d_model, c.num_heads), Attention(c.d_model, c.num_heads)
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(3))
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, past, allowed, memory, memory_allowed):
        present = self.self_attn.keys_values(x)
        if past is not None:
            present = tuple(torch.cat(pair, dim=2) for pair in zip(past, present))
        x = self.norms[0](x + self.self_attn(x, present, allowed))
        x = self.norms[1](x + self.cross_attn(x, memory, memory_allowed))
        return self.norms[2](x + self.fc2(F.relu(self.fc1(x)))), present


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.source_embed, self.target_embed = (nn.Embedding(c.vocab_size, c.d_model) for _ in range(2))
        self.source_pos, self.target_pos = (nn.Embedding(c.max_len, c.d_model) for _ in range(2))
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
        self.lm_head = nn.Linear(c.d_model, c.vocab_size)

    def encode(self, source, mask=None):
        if mask is None:
            mask = torch.ones_like(source, dtype=torch.bool)
        allowed = mask[:, None, None, :]
        x = self.source_embed(source) + self.source_pos.weight[: source.size(1)]
        for layer in self.encoder:
            x = layer(x, allowed)
        return [layer.cross_attn.keys_values(x) for layer in self.decoder], allowed

    def decode(self, target, memory, allowed, past=None, start=0, target_mask=None):
        new, before = target.size(1), 0 if past is None else past[0][0].size(2)
        x = self.target_embed(target) + self.target_pos.weight[start : start + new]
        seen = torch.ones(new, before + new, dtype=torch.bool, device=x.device).tril(before)[None, None]
        if target_mask is not None:
            seen = seen & target_mask[:, None, None, :]
        presents = []
        for index, layer in enumerate(self.decoder):
            x, present = layer(x, None if past is None else past[index], seen, memory[index], allowed)
            presents.append(present)
        return self.lm_head(x), presents

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, *self.encode(source, source_mask), target_mask=target_mask)[0]


def stepwise(model, source, chunks):
    memory, allowed = model.encode(source)
    past, start, outputs = None, 0, []
    for chunk in chunks:
        logits, past = model.decode(chunk, memory, allowed, past, start)
        start += chunk.size(1)
        outputs.append(logits)
    return outputs


subject = Subject(
    kind="encoder_decoder",
    build=Seq2Seq,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    cache=stepwise,
    declares={"causal": True, "positions": "learned", "norm_placement": "post", "padding_side": "right"},
)
