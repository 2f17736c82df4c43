"""BERT's masking for masked language modelling, as a data collator does it."""

import torch

from veriformer.properties import Subject

WHAT = "Random tokens are drawn with 0.1 among what is left of the chosen (20 %), so 2 % are replaced and 18 % kept."
CAUSE = (
    "Of the chosen tokens 2 % are replaced at random and 18 % left, not 10 % and 10 %: the probability of the second draw "
    "is 0.1 where it must be 0.5 of those that were not masked."
)
SPECIAL, MASK = (0, 1, 2, 3), 3


def make(second):
    class Collator:
        def __init__(self, vocab_size):
            self.vocab_size = vocab_size

        def __call__(self, tokens, seed):
            generator = torch.Generator(device=tokens.device).manual_seed(seed)

            def bernoulli(p):
                return torch.rand(tokens.shape, generator=generator, device=tokens.device) < p

            special = torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
            chosen = bernoulli(0.15) & ~special
            labels = tokens.masked_fill(~chosen, -100)
            masked = bernoulli(0.8) & chosen
            inputs = tokens.masked_fill(masked, MASK)
            replaced = bernoulli(second) & chosen & ~masked
            words = torch.randint(len(SPECIAL), self.vocab_size, tokens.shape, generator=generator, device=tokens.device)
            return torch.where(replaced, words, inputs), labels

    return Collator


def subject(second):
    collator = make(second)
    return Subject(
        kind="masking",
        name="MLM collator",
        build=lambda c: collator(c.vocab_size),
        forward=lambda m, tokens, seed: m(tokens, seed),
        declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15},
    )


right = subject(0.5)
wrong = subject(0.1)
