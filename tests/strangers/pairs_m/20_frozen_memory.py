"""zoo/PR 256: translation model on `nn.Transformer`'s halves; `encode` and `step` became methods that the beam search
shares with `forward`."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "`encode`, written for the beam search, runs under no_grad, and the forward of training goes through it as well."
CAUSE = (
    "The decorator @torch.no_grad() on encode cuts the graph at the memory: outputs are right, but neither the encoder "
    "nor the source embedding ever gets a gradient, so half of the model is not trained."
)


class Embed(nn.Module):
    def __init__(self, vocab, d_model, max_len):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, d_model), nn.Embedding(max_len, d_model)

    def forward(self, ids):
        return self.token(ids) + self.place(torch.arange(ids.size(1), device=ids.device))


class Translator(nn.Module):
    def __init__(self, vocab, d_model, nhead, d_ff, depth, max_len, dropout):
        super().__init__()
        kwargs = {"dim_feedforward": d_ff, "dropout": dropout, "batch_first": True}
        self.source, self.target = Embed(vocab, d_model, max_len), Embed(vocab, d_model, max_len)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d_model, nhead, **kwargs), depth, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(d_model, nhead, **kwargs), depth)
        self.generator = nn.Linear(d_model, vocab)

    def encode(self, source, source_mask=None):
        return self.encoder(self.source(source), src_key_padding_mask=flip(source_mask))

    def step(self, target, memory, source_mask=None):
        length = target.size(1)
        ahead = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.decoder(
            self.target(target), memory, tgt_mask=ahead, memory_key_padding_mask=flip(source_mask)
        )
        return self.generator(hidden)

    def forward(self, source, target, source_mask=None):
        return self.step(target, self.encode(source, source_mask), source_mask)

    @torch.no_grad()
    def greedy(self, source, steps, start=0):
        memory = self.encode(source)
        ids = source.new_full((source.size(0), 1), start)
        for _ in range(steps):
            ids = torch.cat([ids, self.step(ids, memory)[:, -1:].argmax(-1)], 1)
        return ids


def flip(mask):
    """True = may attend, to torch's True = hidden; a sample of padding alone hides nothing."""
    return None if mask is None else ~mask & mask.any(1, keepdim=True)


class TranslatorNoGrad(Translator):
    @torch.no_grad()
    def encode(self, source, source_mask=None):
        return super().encode(source, source_mask)


def subject(cls):
    return Subject(
        kind="encoder_decoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, c.dropout),
        forward=lambda m, source, target, source_mask=None: m(source, target, source_mask),
        declares={"padding_side": "right"},
    )


right, wrong = subject(Translator), subject(TranslatorNoGrad)
