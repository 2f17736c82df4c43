"""A sentence classifier in the manner of Keras' text classification with a Transformer; GlobalMaxPooling1D."""

import torch
from torch import nn

from veriformer.properties import Subject


class TokenAndPositionEmbedding(nn.Module):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = nn.Embedding(vocab_size, embed_dim)
        self.pos_emb = nn.Embedding(maxlen, embed_dim)

    def forward(self, x):
        return self.token_emb(x) + self.pos_emb(torch.arange(x.shape[-1], device=x.device))


class TransformerBlock(nn.Module):
    def __init__(self, embed_dim, num_heads, ff_dim, rate):
        super().__init__()
        self.att = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(embed_dim, ff_dim), nn.ReLU(), nn.Linear(ff_dim, embed_dim))
        self.layernorm1, self.layernorm2 = nn.LayerNorm(embed_dim, eps=1e-6), nn.LayerNorm(embed_dim, eps=1e-6)
        self.dropout1, self.dropout2 = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, inputs, mask):
        attn_output, _ = self.att(inputs, inputs, inputs, key_padding_mask=~mask, need_weights=False)
        out1 = self.layernorm1(inputs + self.dropout1(attn_output))
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


class GlobalMaxPooling1D(nn.Module):
    """The largest value of each channel over the tokens that are there."""

    def forward(self, x, mask):
        x = x.masked_fill(~mask.unsqueeze(-1), torch.finfo(x.dtype).min)
        return x.amax(dim=1)


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding_layer = TokenAndPositionEmbedding(c.max_len, c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(
            [TransformerBlock(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)]
        )
        self.pool = GlobalMaxPooling1D()
        self.dropout = nn.Dropout(c.dropout)
        self.outputs = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.embedding_layer(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.outputs(self.dropout(self.pool(x, mask)))


subject = Subject(
    kind="classifier",
    name="max-pooling classifier",
    build=Classifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "pooling": "max",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
    },
)
