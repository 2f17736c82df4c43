"""Masking of items for a recommender (BERT4Rec) in BERT's shares: 80 % hidden, 10 % another item, 10 % as they are."""

import torch
from torch import nn

from veriformer.properties import Subject

PAD, SEP, MASK = 0, 1, 2


class ItemMasker(nn.Module):
    def __init__(self, num_items, probability=0.15):
        super().__init__()
        self.num_items, self.probability = num_items, probability

    def forward(self, items, seed):
        g = torch.Generator().manual_seed(seed)

        def coin(p):
            return torch.rand(items.shape, generator=g) < p

        ordinary = (items != PAD) & (items != SEP) & (items != MASK)
        chosen = coin(self.probability) & ordinary
        labels = items.masked_fill(~chosen, -100)
        hidden = coin(0.8) & chosen
        swapped = coin(0.5) & chosen
        others = torch.randint(MASK + 1, self.num_items, items.shape, generator=g)
        inputs = items.masked_fill(hidden, MASK)
        return torch.where(swapped, others, inputs), labels


subject = Subject(
    kind="masking",
    build=lambda c: ItemMasker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, SEP, MASK), "mask_probability": 0.15, "ignore_index": -100},
)

WHAT = "Line 26: half of all the chosen are swapped, those that are hidden too, rather than half of those that are not: 40 % are hidden and 50 % swapped."
