"""fairseq style encoder-decoder; incremental decoding with cached cross-attention."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class MHA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.h, -1).transpose(1, 2)

    def core(self, q, k, v, allowed):
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if allowed is not None:
            s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        return self.out_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, allowed, state=None):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        if state is not None:
            if "k" in state:
                k, v = torch.cat((state["k"], k), 2), torch.cat((state["v"], v), 2)
            state["k"], state["v"] = k, v
        return self.core(q, k, v, allowed)


class CrossAttention(MHA):
    static_kv = None

    def kv(self, memory):
        return self.split(self.k_proj(memory)), self.split(self.v_proj(memory))

    def forward(self, x, memory, allowed, incremental=False):
        q = self.split(self.q_proj(x))
        if not incremental:
            return self.core(q, *self.kv(memory), allowed)
        shape = (memory.shape[0], self.h, memory.shape[1])
        if self.static_kv is None or self.static_kv[0].shape[:3] != shape:
            self.static_kv = self.kv(memory)
        return self.core(q, *self.static_kv, allowed)


class Ffn(nn.Sequential):
    def __init__(self, d, f):
        super().__init__(nn.Linear(d, f), nn.ReLU(), nn.Linear(f, d))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.ffn = MHA(c.d_model, c.num_heads), Ffn(c.d_model, c.d_ff)
        self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, allowed):
        x = self.ln1(x + self.self_attn(x, allowed))
        return self.ln2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.cross = MHA(c.d_model, c.num_heads), CrossAttention(c.d_model, c.num_heads)
        self.ffn = Ffn(c.d_model, c.d_ff)
        self.ln1, self.ln2, self.ln3 = (nn.LayerNorm(c.d_model) for _ in range(3))

    def forward(self, x, allowed, memory, memory_allowed, state=None):
        x = self.ln1(x + self.self_attn(x, allowed, state))
        x = self.ln2(x + self.cross(x, memory, memory_allowed, incremental=state is not None))
        return self.ln3(x + self.ffn(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d = c.d_model
        self.src, self.tgt = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
        self.out = nn.Linear(c.d_model, c.vocab_size)

    def embed(self, table, ids, start=0):
        at = torch.arange(start, start + ids.shape[1], dtype=torch.float64)[:, None]
        i = torch.arange(self.d)
        angle = at / 10000 ** ((i // 2 * 2).double() / self.d)
        return table(ids) * math.sqrt(self.d) + torch.where(i % 2 == 0, angle.sin(), angle.cos()).to(table.weight.dtype)

    def encode(self, source, source_mask):
        allowed = None if source_mask is None else source_mask[:, None, None, :]
        x = self.embed(self.src, source)
        for layer in self.encoder:
            x = layer(x, allowed)
        return x, allowed

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory, memory_allowed = self.encode(source, source_mask)
        T = target.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        x = self.embed(self.tgt, target)
        for layer in self.decoder:
            x = layer(x, allowed, memory, memory_allowed)
        return self.out(x)

    @torch.no_grad()
    def incremental(self, source, chunks):
        memory, _ = self.encode(source, None)
        for layer in self.decoder:
            layer.cross.static_kv = None
        states, outputs, start = [{} for _ in self.decoder], [], 0
        for chunk in chunks:
            t = chunk.shape[1]
            allowed = torch.ones(t, start + t, dtype=torch.bool).tril(start)
            x = self.embed(self.tgt, chunk, start)
            for layer, state in zip(self.decoder, states):
                x = layer(x, allowed, memory, None, state)
            outputs.append(self.out(x))
            start += t
        return torch.cat(outputs, 1)


subject = Subject(
    kind="encoder_decoder",
    name="fairseq style",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.incremental(source, chunks),
    declares={"positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "post", "activation": "relu", "embedding_scale": True},
)
