WHAT = "labels are kept only where the input became the mask token: tokens that were chosen and replaced at random or left have no label, so 12 % and not 15 % are predicted (and mask tokens of the input are) (line 29)."
"""BERT's masking, vectorised: 15 % are predicted; of these 80 % are hidden, 10 % replaced, 10 % left."""

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = (PAD, CLS, SEP, MASK)
IGNORE = -100
PROBABILITY = 0.15


class Masker:
    def __init__(self, vocab_size):
        if vocab_size <= len(SPECIAL):
            raise ValueError("no ordinary tokens")
        self.vocab_size = vocab_size

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        choice, action = torch.rand(2, *tokens.shape, generator=generator).to(tokens.device)
        random = torch.randint(len(SPECIAL), self.vocab_size, tokens.shape, generator=generator).to(tokens.device)

        ordinary = ~torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
        chosen = ordinary & (choice < PROBABILITY)
        inputs = torch.where(chosen & (action < 0.8), MASK, tokens)
        inputs = torch.where(chosen & (action >= 0.9), random, inputs)
        labels = tokens.masked_fill(inputs != MASK, IGNORE)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="BERT masking",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": PROBABILITY, "ignore_index": IGNORE},
)
