"""Dynamic masking for masked language modelling: of the chosen 80 % [MASK], 10 % random, 10 % kept."""

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
FIRST_WORD = 4


class MaskedLMCollator:
    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size = vocab_size
        self.probability = probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))

        def flip(p):
            return torch.rand(tokens.shape, generator=g) < p

        special = tokens < FIRST_WORD
        chosen = flip(self.probability) & ~special
        masked = chosen & flip(0.8)
        randomised = chosen & ~masked & flip(0.5)

        words = torch.randint(FIRST_WORD, self.vocab_size, tokens.shape, generator=g)
        inputs = tokens.masked_fill(masked, MASK)
        inputs = torch.where(randomised, words, inputs)
        labels = tokens.masked_fill(~chosen, -100)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: MaskedLMCollator(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    domain={"vocab_size": [20, 50]},
    declares={
        "mask_id": MASK,
        "special_ids": (PAD, CLS, SEP, MASK),
        "mask_probability": 0.15,
        "ignore_index": -100,
    },
)
