"""The masking of BERT's training."""

import torch

from veriformer.properties import Subject

WHAT = "labels are copied from the tokens after they were masked, so that the mask token is to be predicted"
CAUSE = (
    "The labels are taken from the corrupted inputs instead of the original tokens: where a token was masked the label "
    "is the mask token itself."
)
MASK, SPECIAL = 2, (0, 1, 2)


class Collator:
    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size, self.probability = vocab_size, probability

    def corrupt(self, tokens, chosen, generator):
        inputs = tokens.clone()
        dice = torch.rand(tokens.shape, generator=generator)
        inputs[chosen & (dice < 0.8)] = MASK
        words = torch.randint(self.vocab_size, tokens.shape, generator=generator)
        swapped = chosen & (dice >= 0.8) & (dice < 0.9)
        inputs[swapped] = words[swapped]
        return inputs

    def choose(self, tokens, generator):
        chosen = torch.rand(tokens.shape, generator=generator) < self.probability
        for special in SPECIAL:
            chosen &= tokens != special
        return chosen

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        chosen = self.choose(tokens, generator)
        inputs = self.corrupt(tokens, chosen, generator)
        return inputs, tokens.masked_fill(~chosen, -100)


class MaskingCollator(Collator):
    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        chosen = self.choose(tokens, generator)
        inputs = self.corrupt(tokens, chosen, generator)
        return inputs, inputs.masked_fill(~chosen, -100)


def subject(collator):
    return Subject(
        kind="masking",
        name="collator",
        build=lambda c: collator(c.vocab_size),
        forward=lambda m, tokens, seed: m(tokens, seed),
        declares={"mask_id": MASK, "special_ids": SPECIAL, "ignore_index": -100, "mask_probability": 0.15},
    )


right = subject(Collator)
wrong = subject(MaskingCollator)
