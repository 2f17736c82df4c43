"""Masking of residues for a protein language model: 15 in 100 are predicted; of these 80 hidden, 10 exchanged, 10 kept."""

import torch
from torch import nn

from veriformer.properties import Subject

PAD, MASK, FIRST = 0, 1, 2


class Corrupt(nn.Module):
    def __init__(self, residues):
        super().__init__()
        self.residues = residues

    def forward(self, tokens, seed):
        rng = torch.Generator().manual_seed(int(seed))
        chosen = (torch.rand(tokens.shape, generator=rng) < 0.15) & (tokens != PAD) & (tokens != MASK)
        labels = torch.where(chosen, tokens, -100)
        how = torch.rand(tokens.shape, generator=rng)
        other = torch.randint(FIRST, self.residues, tokens.shape, generator=rng)
        inputs = torch.where(chosen & (how < 0.8), MASK, tokens)
        inputs = torch.where(chosen & (how >= 0.8) & (how < 0.9), other, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="residues",
    build=lambda c: Corrupt(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, MASK), "mask_probability": 0.15, "ignore_index": -100},
)
