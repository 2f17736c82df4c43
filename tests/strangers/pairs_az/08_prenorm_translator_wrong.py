WHAT = "the residual of the cross-attention starts from the normalised h, not from the stream x (line 76)."
"""An encoder-decoder with pre-norm blocks, for translation; tutorial style."""

import torch
from torch import nn

from veriformer.properties import Subject


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_k = d_model // n_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        batch = query.size(0)
        # 1. project and split into heads
        q = self.w_q(query).view(batch, -1, self.n_heads, self.d_k).transpose(1, 2)
        k = self.w_k(key).view(batch, -1, self.n_heads, self.d_k).transpose(1, 2)
        v = self.w_v(value).view(batch, -1, self.n_heads, self.d_k).transpose(1, 2)
        # 2. scaled dot product
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        attn = torch.softmax(scores, dim=-1)
        # 3. join the heads
        out = (attn @ v).transpose(1, 2).contiguous().view(batch, -1, self.n_heads * self.d_k)
        return self.w_o(out)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.linear_1 = nn.Linear(d_model, d_ff)
        self.linear_2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.linear_2(torch.relu(self.linear_1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.norm_1 = nn.LayerNorm(d_model)
        self.norm_2 = nn.LayerNorm(d_model)
        self.attn = MultiHeadAttention(d_model, n_heads)
        self.ff = FeedForward(d_model, d_ff)

    def forward(self, x, mask):
        h = self.norm_1(x)
        x = x + self.attn(h, h, h, mask)
        h = self.norm_2(x)
        x = x + self.ff(h)
        return x


class DecoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.norm_1 = nn.LayerNorm(d_model)
        self.norm_2 = nn.LayerNorm(d_model)
        self.norm_3 = nn.LayerNorm(d_model)
        self.attn_1 = MultiHeadAttention(d_model, n_heads)
        self.attn_2 = MultiHeadAttention(d_model, n_heads)
        self.ff = FeedForward(d_model, d_ff)

    def forward(self, x, e_outputs, src_mask, trg_mask):
        h = self.norm_1(x)
        x = x + self.attn_1(h, h, h, trg_mask)
        h = self.norm_2(x)
        x = h + self.attn_2(h, e_outputs, e_outputs, src_mask)
        h = self.norm_3(x)
        x = x + self.ff(h)
        return x


class Transformer(nn.Module):
    def __init__(self, vocab, d_model, n_layers, n_heads, d_ff, max_len):
        super().__init__()
        self.src_embed = nn.Embedding(vocab, d_model)
        self.trg_embed = nn.Embedding(vocab, d_model)
        self.src_pos = nn.Embedding(max_len, d_model)
        self.trg_pos = nn.Embedding(max_len, d_model)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, n_heads, d_ff) for _ in range(n_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, n_heads, d_ff) for _ in range(n_layers)])
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder_norm = nn.LayerNorm(d_model)
        self.out = nn.Linear(d_model, vocab)

    def forward(self, src, trg, src_mask=None, trg_mask=None):
        S, T = src.size(1), trg.size(1)
        if src_mask is None:
            src_mask = torch.ones_like(src, dtype=torch.bool)
        if trg_mask is None:
            trg_mask = torch.ones_like(trg, dtype=torch.bool)
        src_mask = src_mask[:, None, None, :]
        nopeak = torch.ones(T, T, dtype=torch.bool, device=trg.device).tril()
        trg_mask = trg_mask[:, None, None, :] & nopeak

        x = self.src_embed(src) + self.src_pos(torch.arange(S, device=src.device))
        for layer in self.encoder:
            x = layer(x, src_mask)
        e_outputs = self.encoder_norm(x)

        x = self.trg_embed(trg) + self.trg_pos(torch.arange(T, device=trg.device))
        for layer in self.decoder:
            x = layer(x, e_outputs, src_mask, trg_mask)
        return self.out(self.decoder_norm(x))


subject = Subject(
    kind="encoder_decoder",
    name="pre-norm translator",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "padding_side": "right",
    },
)
