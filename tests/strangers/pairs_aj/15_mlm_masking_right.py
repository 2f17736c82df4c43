"""BERT's masking: 15 % are chosen; of them 80 % become [MASK], 10 % a random token, 10 % stay."""

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIALS = (PAD, CLS, SEP, MASK)
VOCAB = 64


class MLMCollator:
    def __init__(self, vocab_size=VOCAB, probability=0.15, ignore_index=-100):
        self.vocab_size, self.probability, self.ignore_index = vocab_size, probability, ignore_index

    @staticmethod
    def _uniform(shape, seed, stream):
        """Uniform numbers of one of the independent streams of a seed."""
        generator = torch.Generator().manual_seed((seed * 4 + stream) % 2**63)
        return torch.rand(shape, generator=generator)

    def __call__(self, tokens, seed):
        special = torch.zeros_like(tokens, dtype=torch.bool)
        for token in SPECIALS:
            special |= tokens == token

        chosen = (self._uniform(tokens.shape, seed, 0) < self.probability) & ~special
        labels = torch.where(chosen, tokens, self.ignore_index)

        fate = self._uniform(tokens.shape, seed, 1)
        span = self.vocab_size - len(SPECIALS)
        drawn = len(SPECIALS) + (self._uniform(tokens.shape, seed, 2) * span).long().clamp(max=span - 1)

        inputs = torch.where(chosen & (fate < 0.8), MASK, tokens)
        inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), drawn, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: MLMCollator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    domain={"vocab_size": [VOCAB]},
    declares={
        "mask_id": MASK,
        "special_ids": SPECIALS,
        "mask_probability": 0.15,
        "ignore_index": -100,
    },
)
