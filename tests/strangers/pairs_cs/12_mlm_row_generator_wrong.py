"""A data collator for masked language models, made reproducible: everything is drawn from a generator of the given seed."""
import torch
from torch import nn

from veriformer.properties import Subject

MASK_ID, SPECIAL, SHARE = 3, (0, 1, 2, 3), 0.15


class Collator(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def one(self, row, generator):
        special = torch.isin(row, torch.tensor(SPECIAL, device=row.device))
        hidden = (torch.rand(row.shape, generator=generator) < SHARE) & ~special
        labels = torch.where(hidden, row, torch.full_like(row, -100))
        lot = torch.rand(row.shape, generator=generator)
        words = torch.randint(self.vocab_size, row.shape, generator=generator)
        row = torch.where(hidden & (lot < 0.8), torch.full_like(row, MASK_ID), row)
        row = torch.where(hidden & (lot >= 0.9), words, row)
        return row, labels

    def forward(self, tokens, seed):
        rows = []
        for row in tokens:
            generator = torch.Generator().manual_seed(seed)
            rows.append(self.one(row, generator))
        return torch.stack([r for r, _ in rows]), torch.stack([l for _, l in rows])


subject = Subject(
    kind="masking",
    name="collator for MLM",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK_ID, "special_ids": SPECIAL, "mask_probability": SHARE},
)

WHAT = (
    'The generator is seeded anew for every row of the batch (line 26), so that all samples hide the same positions and draw the same replacements.'
)
