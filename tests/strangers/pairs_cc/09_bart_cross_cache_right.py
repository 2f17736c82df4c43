import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def attend(q, k, v, ok):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~ok, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(~ok, 0.0) @ v


class MultiHead(nn.Module):
    def __init__(self, width, heads, static=False):
        super().__init__()
        self.heads, self.static, self.saved = heads, static, None
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, source, ok, incremental=False):
        if incremental and self.static:
            fits = self.saved is not None and self.saved[0].shape[0::2] == source.shape[:2]
            if not fits:
                self.saved = self.split(self.k_proj(source)), self.split(self.v_proj(source))
            k, v = self.saved
        else:
            k, v = self.split(self.k_proj(source)), self.split(self.v_proj(source))
            if incremental:
                if self.saved is not None:
                    k, v = torch.cat([self.saved[0], k], 2), torch.cat([self.saved[1], v], 2)
                self.saved = k, v
        y = attend(self.split(self.q_proj(x)), k, v, ok)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = MultiHead(c.d_model, c.num_heads)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, ok):
        x = self.norm1(x + self.self_attn(x, x, ok))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = MultiHead(c.d_model, c.num_heads)
        self.encoder_attn = MultiHead(c.d_model, c.num_heads, static=True)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(c.d_model) for _ in range(3))

    def forward(self, x, memory, ok, memory_ok, incremental):
        x = self.norm1(x + self.self_attn(x, x, ok, incremental))
        x = self.norm2(x + self.encoder_attn(x, memory, memory_ok, incremental))
        return self.norm3(x + self.fc2(F.gelu(self.fc1(x))))


class Bart(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder_positions = nn.Embedding(c.max_len, c.d_model)
        self.decoder_positions = nn.Embedding(c.max_len, c.d_model)
        self.encoder_layers = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder_layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def encode(self, source, source_mask=None):
        x = self.shared(source) + self.encoder_positions(torch.arange(source.shape[1], device=source.device))
        seen = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask.bool()
        seen = seen[:, None, None, :]
        for layer in self.encoder_layers:
            x = layer(x, seen)
        return x, seen

    def decode(self, target, memory, memory_ok, target_mask=None, past=0, incremental=False):
        total = past + target.shape[1]
        place = torch.arange(past, total, device=target.device)
        ok = (torch.arange(total, device=target.device) <= place[:, None])[None, None]
        if target_mask is not None:
            ok = ok & target_mask.bool()[:, None, None, :]
        x = self.shared(target) + self.decoder_positions(place)
        for layer in self.decoder_layers:
            x = layer(x, memory, ok, memory_ok, incremental)
        return self.lm_head(x)

    def reset_incremental(self, everything):
        for layer in self.decoder_layers:
            layer.self_attn.saved = None
            if everything:
                layer.encoder_attn.saved = None

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory, memory_ok = self.encode(source, source_mask)
        return self.decode(target, memory, memory_ok, target_mask)

    @torch.no_grad()
    def incremental_decode(self, source, chunks):
        self.reset_incremental(everything=True)
        memory, memory_ok = self.encode(source)
        outputs, past = [], 0
        for chunk in chunks:
            outputs.append(self.decode(chunk, memory, memory_ok, past=past, incremental=True))
            past += chunk.shape[1]
        return outputs


subject = Subject(
    kind="encoder_decoder",
    name="bart",
    build=Bart,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.incremental_decode(source, chunks),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "post", "final_norm": False,
              "activation": "gelu", "bias": True, "output_bias": False, "tied": False, "padding_side": "right"},
)
