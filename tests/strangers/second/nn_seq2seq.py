import torch
from torch import nn


class TranslationModel(nn.Module):
    def __init__(self, input_vocab_size, target_vocab_size, d_model, num_heads, dff, num_layers, maximum_position_encoding=128, rate=0.1):
        super().__init__()
        self.src = nn.Embedding(input_vocab_size, d_model)
        self.tgt = nn.Embedding(target_vocab_size, d_model)
        self.pos = nn.Embedding(maximum_position_encoding, d_model)
        self.t = nn.Transformer(d_model, num_heads, num_layers, num_layers, dff, rate, batch_first=True)
        self.out = nn.Linear(d_model, target_vocab_size)

    def forward(self, src, tgt, src_key_padding_mask=None):
        s = self.src(src) + self.pos(torch.arange(src.size(1), device=src.device))
        t = self.tgt(tgt) + self.pos(torch.arange(tgt.size(1), device=src.device))
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1)).to(s)
        y = self.t(s, t, tgt_mask=causal, src_key_padding_mask=src_key_padding_mask, memory_key_padding_mask=src_key_padding_mask)
        return self.out(y)
