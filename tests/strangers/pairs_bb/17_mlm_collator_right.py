"""BERT's masking as a data collator: 15 % are chosen; 80 % of these hidden, 10 % another token, 10 % left."""
from dataclasses import dataclass

import torch

from veriformer.properties import Subject

IGNORE = -100
SPECIAL = (0, 1, 2)
MASK = 3


@dataclass
class Collator:
    vocab_size: int
    mlm_probability: float = 0.15

    def __call__(self, tokens, seed):
        dice = torch.Generator().manual_seed(int(seed))
        special = torch.isin(tokens, torch.tensor(SPECIAL))
        chosen = (torch.rand(tokens.shape, generator=dice) < self.mlm_probability) & ~special
        fate = torch.rand(tokens.shape, generator=dice)
        others = torch.randint(self.vocab_size, tokens.shape, generator=dice)
        inputs = torch.where(chosen & (fate < 0.8), MASK, tokens)
        inputs = torch.where(chosen & (fate >= 0.9), others, inputs)
        labels = torch.where(chosen, tokens, IGNORE)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": IGNORE},
)
