"""Classifier that pools by attention with one learned query over torch.nn.TransformerEncoder. Unusual: a sample that is all
padding is pooled as if it were all real (finite, meaningless); right, nobody asks what it is."""
import torch
from torch import nn
from veriformer.properties import Subject


class Pooled(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.emb, s.pos = nn.Embedding(c.vocab_size, D), nn.Embedding(c.max_len, D)
        layer = nn.TransformerEncoderLayer(D, c.num_heads, c.d_ff, c.dropout, "gelu", batch_first=True, norm_first=True)
        s.enc = nn.TransformerEncoder(layer, c.num_layers, norm=nn.LayerNorm(D), enable_nested_tensor=False)
        s.score, s.head = nn.Linear(D, 1), nn.Linear(D, c.num_classes)

    def forward(s, tokens, mask=None):
        x = s.emb(tokens) + s.pos(torch.arange(tokens.shape[1], device=tokens.device))
        hide = None if mask is None else ~(mask | ~mask.any(1, keepdim=True))
        h = s.enc(x, src_key_padding_mask=hide)
        w = s.score(h)[..., 0]
        if hide is not None:
            w = w.masked_fill(hide, float("-inf"))
        return s.head(torch.einsum("bt,btd->bd", w.softmax(-1), h))


args = dict(kind="classifier", build=Pooled, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "learned", "beyond_max_len": "error", "pooling": "weighted", "norm": "layer",
                                     "norm_placement": "pre", "final_norm": True, "activation": "gelu", "bias": True, "output_bias": True,
                                     "padding_side": "right"})
