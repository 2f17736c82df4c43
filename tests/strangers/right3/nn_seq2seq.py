"""An encoder-decoder on nn.Transformer with shared embeddings and learned positions."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.core = nn.Transformer(c.d_model, c.num_heads, c.num_layers, c.num_layers, c.d_ff, c.dropout,
                                   batch_first=True, norm_first=True)
        self.generator = nn.Linear(c.d_model, c.vocab_size)

    def embed(self, t):
        return self.emb(t) * math.sqrt(self.emb.embedding_dim) + self.pos(torch.arange(t.size(1), device=t.device))

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        future = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device).triu(1)
        pad = None if src_mask is None else ~src_mask
        tpad = None if tgt_mask is None else ~tgt_mask
        y = self.core(self.embed(src), self.embed(tgt), tgt_mask=future, src_key_padding_mask=pad,
                      tgt_key_padding_mask=tpad, memory_key_padding_mask=pad)
        return self.generator(y)

common = dict(kind="encoder_decoder", build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "relu",
    "embedding_scale": True, "cross_attention": True, "padding_side": "right"})
