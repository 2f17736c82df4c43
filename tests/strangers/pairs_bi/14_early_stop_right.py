import torch
from torch import nn

from veriformer.properties import Subject

PAD, BOS, EOS = 0, 1, 2


class Translator(nn.Module):
    def __init__(self, vocab, d_model, heads, layers, d_ff, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.source_positions = nn.Embedding(max_len, d_model)
        self.target_positions = nn.Embedding(max_len, d_model)
        sizes = dict(d_model=d_model, nhead=heads, dim_feedforward=d_ff, dropout=0.0, batch_first=True)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(**sizes) for _ in range(layers)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(**sizes) for _ in range(layers)])
        self.project = nn.Linear(d_model, vocab)

    def encode(self, source, hidden):
        x = self.embed(source) + self.source_positions.weight[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=hidden)
        return x

    def decode(self, target, memory, memory_hidden, target_hidden=None):
        n = target.shape[1]
        x = self.embed(target) + self.target_positions.weight[:n]
        future = torch.ones(n, n, dtype=torch.bool, device=target.device).triu(1)
        for layer in self.decoder:
            x = layer(
                x,
                memory,
                tgt_mask=future,
                tgt_key_padding_mask=target_hidden,
                memory_key_padding_mask=memory_hidden,
            )
        return self.project(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_hidden = None if source_mask is None else ~source_mask
        target_hidden = None if target_mask is None else ~target_mask
        return self.decode(target, self.encode(source, source_hidden), source_hidden, target_hidden)

    @torch.no_grad()
    def translate(self, source, steps):
        memory = self.encode(source, None)
        ids = source.new_full((source.shape[0], 1), BOS)
        finished = torch.zeros(source.shape[0], dtype=torch.bool, device=source.device)
        for _ in range(steps):
            best = self.decode(ids, memory, None)[:, -1].argmax(-1)
            best = torch.where(finished, torch.full_like(best, PAD), best)
            ids = torch.cat([ids, best[:, None]], dim=1)
            finished = finished | (best == EOS)
            if finished.all():
                break
        return ids


subject = Subject(
    kind="encoder_decoder",
    name="translator with greedy search",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    generate=lambda m, source, steps, use_cache=False: m.translate(source, steps),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
        "final_norm": False,
    },
)
