"""Dynamic BERT masking in a collator: 15 % of the tokens, 80/10/10."""

from dataclasses import dataclass

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3


@dataclass
class MlmCollator:
    vocab_size: int
    probability: float = 0.15

    def __post_init__(self):
        if self.vocab_size <= 4:
            raise ValueError("no ordinary token in the vocabulary")

    def __call__(self, tokens, seed):
        rng = torch.Generator().manual_seed(int(seed))
        special = torch.isin(tokens, torch.tensor([PAD, CLS, SEP, MASK]))
        chosen = (torch.rand(tokens.shape, generator=rng) < self.probability) & ~special

        dice = torch.rand(tokens.shape, generator=rng)
        words = torch.randint(4, self.vocab_size, tokens.shape, generator=rng)
        inputs = tokens.clone()
        inputs[chosen & (dice < 0.8)] = MASK
        swap = chosen & (dice >= 0.8) & (dice < 0.9)
        inputs[swap] = words[swap]

        labels = tokens.clone()
        labels[~chosen] = -100
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: MlmCollator(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={
        "mask_id": MASK,
        "special_ids": (PAD, CLS, SEP, MASK),
        "mask_probability": 0.15,
        "ignore_index": -100,
    },
)
