WHAT = 'the factor sqrt(d_model) is applied after positions have been added, so that it multiplies the sinusoids too, not the token embeddings alone (line 45: return self.position(self.lut(tokens)) * self.scale)'
"""Translation with one vocabulary for both sides: embeddings shared by encoder, decoder and output (annotated style)."""
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        pe = torch.zeros(max_len, d_model, dtype=torch.float64)
        position = torch.arange(max_len, dtype=torch.float64).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)[:, : d_model // 2]
        self.register_buffer("pe", pe.to(torch.get_default_dtype()).unsqueeze(0), persistent=False)

    def forward(self, x):
        if x.size(1) > self.pe.size(1):
            raise ValueError("sentence too long")
        return x + self.pe[:, : x.size(1)]


class Translator(nn.Module):
    def __init__(self, vocab, d_model, nhead, num_layers, d_ff, max_len):
        super().__init__()
        self.scale = math.sqrt(d_model)
        self.lut = nn.Embedding(vocab, d_model)
        nn.init.normal_(self.lut.weight, std=d_model**-0.5)
        self.position = PositionalEncoding(d_model, max_len)
        self.encoder = nn.ModuleList(
            [nn.TransformerEncoderLayer(d_model, nhead, d_ff, 0.0, "relu", batch_first=True, norm_first=True) for _ in range(num_layers)]
        )
        self.decoder = nn.ModuleList(
            [nn.TransformerDecoderLayer(d_model, nhead, d_ff, 0.0, "relu", batch_first=True, norm_first=True) for _ in range(num_layers)]
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.generator = nn.Linear(d_model, vocab, bias=False)
        self.generator.weight = self.lut.weight

    def embed(self, tokens):
        return self.position(self.lut(tokens)) * self.scale

    def forward(self, source, target, source_mask=None, target_mask=None):
        hide_source = None if source_mask is None else ~source_mask
        hide_target = None if target_mask is None else ~target_mask
        T = target.size(1)
        future = torch.ones(T, T, dtype=torch.bool, device=target.device).triu(1)
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=hide_source)
        memory = self.encoder_norm(memory)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(
                x, memory, tgt_mask=future, tgt_key_padding_mask=hide_target, memory_key_padding_mask=hide_source
            )
        return self.generator(self.decoder_norm(x))


subject = Subject(
    kind="encoder_decoder",
    name="translator with shared embeddings",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"causal": True, "positions": "sinusoidal", "layout": "interleaved", "embedding_scale": True, "tied": True,
              "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "relu", "output_bias": False,
              "padding_side": "right"},
)
