"""nn.Transformer as a seq2seq model that turns a string round. Batches are (source, decoder input, labels)."""
import torch
import torch.nn as nn

from veriformer.ablations import Recipe, Study, Task, Variant

BOS, VOCAB, LEN = 0, 12, 6


def reverse_batch(seed, step, n=24):
    g = torch.Generator().manual_seed(7919 * seed + 104729 * (step + 1))
    src = torch.randint(1, VOCAB, (n, LEN), generator=g)
    tgt = src.flip(1)
    tgt_in = torch.cat([torch.full((n, 1), BOS), tgt[:, :-1]], dim=1)
    return src, tgt_in, tgt


class Seq2Seq(nn.Module):
    def __init__(self, d=16, layers=1, pre_ln=False, activation="relu", dropout=0.1):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.pos = nn.Embedding(LEN, d)
        self.core = nn.Transformer(d, 2, layers, layers, 2 * d, dropout, activation=activation,
                                   norm_first=pre_ln, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, src, tgt_in):
        p = self.pos(torch.arange(src.size(1), device=src.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tgt_in.size(1))
        return self.out(self.core(self.emb(src) + p, self.emb(tgt_in) + p, tgt_mask=mask, tgt_is_causal=True))


study = Study(
    name="seq2seq-norms",
    question="Pre-LN or post-LN for a one-layer nn.Transformer?",
    build=Seq2Seq,
    tasks=Task(name="reverse", data=reverse_batch),
    recipe=Recipe(steps=40, learning_rate=1e-2, warm_up=4),
    variants=[
        Variant("post-LN"),
        Variant("pre-LN", config={"pre_ln": True}),
        Variant("gelu", config={"activation": "gelu"}),
        Variant("no dropout", config={"dropout": 0.0}),
    ],
)
