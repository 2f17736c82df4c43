"""BERT: word + position + segment embeddings under a LayerNorm, post-LN blocks, the mask added as (1 - mask) * finfo.min.
Returns the hidden states. Unusual: the segment table's second row is never read; right, there is one segment."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class BertLayer(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.heads = c.num_heads
        s.query, s.key, s.value, s.dense = (nn.Linear(D, D) for _ in range(4))
        s.inter, s.out = nn.Linear(D, c.d_ff), nn.Linear(c.d_ff, D)
        s.norm1, s.norm2, s.drop = nn.LayerNorm(D, eps=1e-12), nn.LayerNorm(D, eps=1e-12), nn.Dropout(c.dropout)

    def split(s, x):
        return x.view(*x.shape[:2], s.heads, -1).permute(0, 2, 1, 3)

    def forward(s, h, ext):
        q, k, v = s.split(s.query(h)), s.split(s.key(h)), s.split(s.value(h))
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        if ext is not None:
            scores = scores + ext
        ctx = torch.matmul(s.drop(F.softmax(scores, dim=-1)), v).permute(0, 2, 1, 3).contiguous().flatten(2)
        h = s.norm1(s.drop(s.dense(ctx)) + h)
        return s.norm2(s.drop(s.out(F.gelu(s.inter(h)))) + h)


class Bert(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.word, s.pos, s.seg = nn.Embedding(c.vocab_size, D), nn.Embedding(c.max_len, D), nn.Embedding(2, D)
        s.norm, s.drop = nn.LayerNorm(D, eps=1e-12), nn.Dropout(c.dropout)
        s.layers = nn.ModuleList(BertLayer(c) for _ in range(c.num_layers))

    def forward(s, ids, mask=None):
        pos = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        h = s.drop(s.norm(s.word(ids) + s.pos(pos) + s.seg(torch.zeros_like(ids))))
        ext = None
        if mask is not None:
            ext = (1.0 - mask[:, None, None, :].to(h.dtype)) * torch.finfo(h.dtype).min
        for layer in s.layers:
            h = layer(h, ext)
        return h


args = dict(kind="encoder", build=Bert, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "learned", "beyond_max_len": "error", "norm": "layer", "norm_placement": "post",
                                     "final_norm": False, "activation": "gelu", "bias": True, "padding_side": "right"})
