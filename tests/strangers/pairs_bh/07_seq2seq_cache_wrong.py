WHAT = "the length of the past is read from the cross-attention's keys (index 2) instead of the self-attention's: cached steps get positions that begin at the source's length (line 86)."
"""An encoder-decoder with past_key_values (self_k, self_v, cross_k, cross_v) a layer, as older Hugging Face models have it."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoidal(start, length, dim, ref):
    pos = torch.arange(start, start + length, dtype=torch.float64, device=ref.device).unsqueeze(1)
    div = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64, device=ref.device) * (-math.log(10000.0) / dim))
    out = torch.zeros(length, dim, dtype=torch.float64, device=ref.device)
    out[:, 0::2] = torch.sin(pos * div)
    out[:, 1::2] = torch.cos(pos * div)[:, : dim // 2]
    return out.to(ref.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def shape(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def keys_values(self, x):
        return self.shape(self.k_proj(x)), self.shape(self.v_proj(x))

    def forward(self, x, k, v, allowed=None):
        y = F.scaled_dot_product_attention(self.shape(self.q_proj(x)), k, v, attn_mask=allowed)
        return self.out_proj(y.transpose(1, 2).reshape(x.shape))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.self_attn = Attention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, allowed):
        x = self.norm1(x + self.self_attn(x, *self.self_attn.keys_values(x), allowed))
        return self.norm2(x + self.fc2(F.relu(self.fc1(x))))


class DecoderLayer(EncoderLayer):
    def __init__(self, dim, heads, ffn):
        super().__init__(dim, heads, ffn)
        self.encoder_attn = Attention(dim, heads)
        self.norm3 = nn.LayerNorm(dim)

    def forward(self, x, memory, self_allowed, cross_allowed, past=None):
        k, v = self.self_attn.keys_values(x)
        if past is None:
            cross_k, cross_v = self.encoder_attn.keys_values(memory)
        else:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
            cross_k, cross_v = past[2], past[3]
        x = self.norm1(x + self.self_attn(x, k, v, self_allowed))
        x = self.norm2(x + self.encoder_attn(x, cross_k, cross_v, cross_allowed))
        x = self.norm3(x + self.fc2(F.relu(self.fc1(x))))
        return x, (k, v, cross_k, cross_v)


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList([EncoderLayer(dim, heads, ffn) for _ in range(layers)])
        self.decoder = nn.ModuleList([DecoderLayer(dim, heads, ffn) for _ in range(layers)])
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def encode(self, source, source_mask=None):
        x = self.embed(source)
        x = x + sinusoidal(0, source.size(1), x.size(-1), x)
        allowed = None if source_mask is None else source_mask[:, None, None, :]
        for layer in self.encoder:
            x = layer(x, allowed)
        return x

    def decode(self, target, memory, source_mask=None, target_mask=None, past_key_values=None):
        past_len = past_key_values[0][2].size(2) if past_key_values is not None else 0
        x = self.embed(target)
        x = x + sinusoidal(past_len, target.size(1), x.size(-1), x)
        total = target.size(1) if past_key_values is None else target.size(1) + past_key_values[0][1].size(2)
        allowed = torch.ones(target.size(1), total, dtype=torch.bool, device=x.device)
        allowed = allowed.tril(total - target.size(1))[None, None]
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        cross = None if source_mask is None else source_mask[:, None, None, :]
        presents = []
        for i, layer in enumerate(self.decoder):
            x, present = layer(x, memory, allowed, cross, None if past_key_values is None else past_key_values[i])
            presents.append(present)
        return self.lm_head(x), presents

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)[0]


def cached(model, source, chunks):
    memory, past, outputs = model.encode(source), None, []
    for chunk in chunks:
        logits, past = model.decode(chunk, memory, past_key_values=past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq with past_key_values",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=cached,
    declares={
        "causal": True, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "post",
        "final_norm": False, "activation": "relu", "padding_side": "right",
    },
)
