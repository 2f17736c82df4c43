WHAT = "the decoder's cache counts its position offset as the length of the last chunk (`state['offset'] = tgt.size(1)`), not of all chunks so far, so from the third chunk on positions repeat"
import math

import torch
from torch import nn

from veriformer.properties import Subject


class MHA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj = nn.Linear(d, d), nn.Linear(d, d)
        self.v_proj, self.out_proj = nn.Linear(d, d), nn.Linear(d, d)

    def heads(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def project(self, memory):
        return self.heads(self.k_proj(memory)), self.heads(self.v_proj(memory))

    def forward(self, query, kv, allowed=None):
        k, v = kv
        q = self.heads(self.q_proj(query))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn = MHA(d, h)
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, allowed):
        x = self.norm1(x + self.self_attn(x, self.self_attn.project(x), allowed))
        return self.norm2(x + self.fc2(torch.relu(self.fc1(x))))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn, self.cross_attn = MHA(d, h), MHA(d, h)
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, memory, self_allowed, cross_allowed, past=None):
        kv = self.self_attn.project(x)
        if past is not None:
            if past:
                kv = tuple(torch.cat([old, new], dim=2) for old, new in zip(past["kv"], kv))
            past["kv"] = kv
        x = self.norm1(x + self.self_attn(x, kv, self_allowed))
        x = self.norm2(x + self.cross_attn(x, self.cross_attn.project(memory), cross_allowed))
        return self.norm3(x + self.fc2(torch.relu(self.fc1(x))))


class Translator(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len):
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.src_pos, self.tgt_pos = nn.Embedding(max_len, d), nn.Embedding(max_len, d)
        self.encoder = nn.ModuleList(EncoderLayer(d, h, ff) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(d, h, ff) for _ in range(layers))
        self.generator = nn.Linear(d, vocab)

    def encode(self, src, src_mask=None):
        allowed = None if src_mask is None else src_mask[:, None, None, :]
        x = self.src_embed(src) + self.src_pos(torch.arange(src.size(1), device=src.device))
        for layer in self.encoder:
            x = layer(x, allowed)
        return x

    def decode(self, tgt, memory, src_mask=None, tgt_mask=None, state=None):
        past, offset = 0, 0
        if state is not None and state["layers"][0]:
            past, offset = state["layers"][0]["kv"][0].size(2), state["offset"]
        steps = torch.arange(tgt.size(1), device=tgt.device)
        allowed = torch.arange(past + tgt.size(1), device=tgt.device) <= past + steps[:, None]
        if tgt_mask is not None:
            allowed = allowed & tgt_mask[:, None, None, :]
        cross = None if src_mask is None else src_mask[:, None, None, :]
        x = self.tgt_embed(tgt) + self.tgt_pos(offset + steps)
        for i, layer in enumerate(self.decoder):
            x = layer(x, memory, allowed, cross, None if state is None else state["layers"][i])
        if state is not None:
            state["offset"] = tgt.size(1)
        return self.generator(x)

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        return self.decode(tgt, self.encode(src, src_mask), src_mask, tgt_mask)

    def incremental(self, src, chunks):
        memory = self.encode(src)
        state = {"offset": 0, "layers": [{} for _ in self.decoder]}
        return [self.decode(chunk, memory, state=state) for chunk in chunks]


subject = Subject(
    kind="encoder_decoder",
    name="translator with incremental state",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.incremental(source, chunks),
    declares={"positions": "learned", "norm_placement": "post", "norm": "layer", "activation": "relu", "padding_side": "right"},
)
