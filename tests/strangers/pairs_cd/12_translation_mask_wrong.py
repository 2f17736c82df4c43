WHAT = "the decoder takes the source's padding from rows of the memory that are all zero, but the encoder has made those rows nonzero, so cross-attention sees padding (line 65: memory_hidden = (memory == 0).all(dim=-1))"
"""Translation model on nn.MultiheadAttention (True in key_padding_mask: hidden)."""
import torch
from torch import nn

from veriformer.properties import Subject


class FF(nn.Sequential):
    def __init__(self, d, d_ff):
        super().__init__(nn.Linear(d, d_ff), nn.ReLU(), nn.Linear(d_ff, d))


class EncLayer(nn.Module):
    def __init__(self, d, h, d_ff):
        super().__init__()
        self.attn, self.ff = nn.MultiheadAttention(d, h, batch_first=True), FF(d, d_ff)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, hidden):
        y = self.n1(x)
        x = x + self.attn(y, y, y, key_padding_mask=hidden, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class DecLayer(nn.Module):
    def __init__(self, d, h, d_ff):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d, h, batch_first=True)
        self.cross = nn.MultiheadAttention(d, h, batch_first=True)
        self.ff = FF(d, d_ff)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, memory, future, target_hidden, source_hidden):
        y = self.n1(x)
        x = x + self.self_attn(y, y, y, attn_mask=future, key_padding_mask=target_hidden, need_weights=False)[0]
        y = self.n2(x)
        x = x + self.cross(y, memory, memory, key_padding_mask=source_hidden, need_weights=False)[0]
        return x + self.ff(self.n3(x))


class Translator(nn.Module):
    def __init__(self, vocab, d, h, n, d_ff, max_len):
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.src_pos, self.tgt_pos = nn.Embedding(max_len, d), nn.Embedding(max_len, d)
        self.enc = nn.ModuleList(EncLayer(d, h, d_ff) for _ in range(n))
        self.dec = nn.ModuleList(DecLayer(d, h, d_ff) for _ in range(n))
        self.enc_norm, self.dec_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.out = nn.Linear(d, vocab)

    def encode(self, source, hidden):
        x = self.src(source) + self.src_pos.weight[: source.shape[1]]
        if hidden is not None:
            x = x.masked_fill(hidden[..., None], 0.0)
        for layer in self.enc:
            x = layer(x, hidden)
        return self.enc_norm(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_hidden = None if source_mask is None else ~source_mask
        target_hidden = None if target_mask is None else ~target_mask
        memory = self.encode(source, source_hidden)
        if source_hidden is not None:
            memory_hidden = (memory == 0).all(dim=-1)
        else:
            memory_hidden = None
        T = target.shape[1]
        future = torch.ones(T, T, dtype=torch.bool, device=target.device).triu(1)
        x = self.tgt(target) + self.tgt_pos.weight[:T]
        for layer in self.dec:
            x = layer(x, memory, future, target_hidden, memory_hidden)
        return self.out(self.dec_norm(x))


subject = Subject(
    kind="encoder_decoder",
    name="translator",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask),
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "padding_side": "right", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "relu"},
)
