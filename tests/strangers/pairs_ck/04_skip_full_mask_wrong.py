"""BERT-like encoder. Speed-up: a mask that hides nothing is dropped, so that the fused kernel takes its fast path."""
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from veriformer.properties import Subject


class BertLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d = cfg.d_model
        self.n = cfg.num_heads
        self.query, self.key, self.value, self.dense = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.attention_norm, self.output_norm = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)
        self.intermediate, self.output = nn.Linear(d, cfg.d_ff), nn.Linear(cfg.d_ff, d)

    def heads(self, x):
        return x.unflatten(-1, (self.n, -1)).transpose(1, 2)

    def forward(self, x, bias):
        y = scaled_dot_product_attention(self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x)),
                                         attn_mask=bias)
        x = self.attention_norm(x + self.dense(y.transpose(1, 2).flatten(2)))
        return self.output_norm(x + self.output(gelu(self.intermediate(x))))


class Bert(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.word, self.position = nn.Embedding(cfg.vocab_size, cfg.d_model), nn.Embedding(cfg.max_len, cfg.d_model)
        self.norm = nn.LayerNorm(cfg.d_model, eps=1e-12)
        self.layers = nn.ModuleList([BertLayer(cfg) for _ in range(cfg.num_layers)])

    def prepare(self, mask, dtype):
        if mask is None or mask.all(-1).any():
            return None
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return bias.masked_fill(~mask, torch.finfo(dtype).min)[:, None, None, :]

    def forward(self, ids, mask=None):
        x = self.norm(self.word(ids) + self.position.weight[: ids.shape[1]])
        bias = self.prepare(mask, x.dtype)
        for layer in self.layers:
            x = layer(x, bias)
        return x


def build(c):
    return Bert(c)


subject = Subject(
    kind="encoder",
    build=build,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu",
              "padding_side": "right"},
)

WHAT = 'Line 36: the mask is dropped for the whole batch as soon as one sample of it has no padding, not only when all have none; the padding of the others is then attended to.'
