"""BERT's masking with a torch.Generator: of 15 % of the tokens four fifths are hidden, a tenth is replaced, a tenth stays.

Unusual: what happens to a token is read off one uniform number per position (below 0.12 hidden, below 0.135 replaced, below 0.15
kept), so one draw decides. Special tokens are never chosen and never put in as a replacement. The input is not altered.
"""

import torch
from torch import nn

from veriformer.properties import Subject

SPECIALS = (0, 1, 2)
MASK_ID = 3
FIRST_WORD = 4
PROBABILITY = 0.15
IGNORE = -100


class BertMasking(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, tokens, seed):
        generator = torch.Generator().manual_seed(int(seed))
        draw = torch.rand(tokens.shape, generator=generator, dtype=torch.float64).to(tokens.device)
        words = torch.randint(FIRST_WORD, self.vocab_size, tokens.shape, generator=generator).to(tokens)
        eligible = ~torch.isin(tokens, torch.tensor((*SPECIALS, MASK_ID), device=tokens.device))
        chosen = eligible & (draw < PROBABILITY)
        labels = torch.where(chosen, tokens, IGNORE)
        inputs = torch.where(chosen & (draw < 0.8 * PROBABILITY), MASK_ID, tokens)
        replaced = chosen & (draw >= 0.8 * PROBABILITY) & (draw < 0.9 * PROBABILITY)
        return torch.where(replaced, words, inputs), labels


COMMON = dict(
    kind="masking",
    build=lambda c: BertMasking(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    domain={"vocab_size": [24, 40, 64]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "mask_id": MASK_ID,
        "special_ids": (*SPECIALS, MASK_ID),
        "mask_probability": PROBABILITY,
        "ignore_index": IGNORE,
    },
)
