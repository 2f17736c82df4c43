"""The Annotated Transformer: clones(), -1e9 masks, pre-norm with final norms, scaled embeddings, a generator that returns
log-probabilities. Unusual: outputs are log_softmax, not logits; right, the loss there is a KL divergence."""
import copy
import math
import torch
from torch import nn
from veriformer.properties import Subject


def clones(m, n):
    return nn.ModuleList(copy.deepcopy(m) for _ in range(n))


def attention(q, k, v, mask=None, dropout=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p = scores.softmax(dim=-1)
    return torch.matmul(p if dropout is None else dropout(p), v)


class MultiHeadedAttention(nn.Module):
    def __init__(s, h, d, p):
        super().__init__()
        s.h, s.linears, s.dropout = h, clones(nn.Linear(d, d), 4), nn.Dropout(p)

    def forward(s, q, k, v, mask=None):
        mask = None if mask is None else mask.unsqueeze(1)
        B = q.size(0)
        q, k, v = [lin(x).view(B, -1, s.h, x.size(-1) // s.h).transpose(1, 2) for lin, x in zip(s.linears, (q, k, v))]
        x = attention(q, k, v, mask, s.dropout).transpose(1, 2).contiguous()
        return s.linears[-1](x.view(B, x.size(1), -1))


class Layer(nn.Module):
    def __init__(s, c, cross):
        super().__init__()
        d = c.d_model
        s.attn, s.src = MultiHeadedAttention(c.num_heads, d, c.dropout), MultiHeadedAttention(c.num_heads, d, c.dropout) if cross else None
        s.ff = nn.Sequential(nn.Linear(d, c.d_ff), nn.ReLU(), nn.Dropout(c.dropout), nn.Linear(c.d_ff, d))
        s.norms, s.drop = clones(nn.LayerNorm(d), 3 if cross else 2), nn.Dropout(c.dropout)

    def forward(s, x, mask, memory=None, src_mask=None):
        y = s.norms[0](x)
        x = x + s.drop(s.attn(y, y, y, mask))
        if s.src is not None:
            x = x + s.drop(s.src(s.norms[1](x), memory, memory, src_mask))
        return x + s.drop(s.ff(s.norms[-1](x)))


class Stack(nn.Module):
    def __init__(s, c, cross):
        super().__init__()
        s.d, s.lut, s.drop = c.d_model, nn.Embedding(c.vocab_size, c.d_model), nn.Dropout(c.dropout)
        s.layers, s.norm = nn.ModuleList(Layer(c, cross) for _ in range(c.num_layers)), nn.LayerNorm(c.d_model)

    def forward(s, ids, mask, *memory):
        x = s.lut(ids) * math.sqrt(s.d)
        pe = torch.zeros(ids.size(1), s.d, dtype=torch.float64)
        position = torch.arange(0, ids.size(1), dtype=torch.float64).unsqueeze(1)
        div = torch.exp(torch.arange(0, s.d, 2, dtype=torch.float64) * -(math.log(10000.0) / s.d))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div), torch.cos(position * div)
        x = s.drop(x + pe.to(x))
        for layer in s.layers:
            x = layer(x, mask, *memory)
        return s.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.enc, s.dec, s.generator = Stack(c, False), Stack(c, True), nn.Linear(c.d_model, c.vocab_size)

    def forward(s, src, tgt, src_mask=None, tgt_mask=None):
        src_mask = None if src_mask is None else src_mask.unsqueeze(-2)
        sub = torch.triu(torch.ones(1, tgt.size(-1), tgt.size(-1), device=tgt.device), diagonal=1) == 0
        tgt_mask = sub if tgt_mask is None else tgt_mask.unsqueeze(-2) & sub
        return s.generator(s.dec(tgt, tgt_mask, s.enc(src, src_mask), src_mask)).log_softmax(-1)


args = dict(kind="encoder_decoder", build=EncoderDecoder,
            forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "sinusoidal", "layout": "interleaved", "embedding_scale": True, "norm": "layer",
                                     "norm_placement": "pre", "final_norm": True, "activation": "relu", "bias": True, "output_bias": True,
                                     "tied": False, "padding_side": "right"})
