WHAT = "the offset of the counter-based generator is never advanced, so that choice and action are the same numbers: all that is chosen (u < 0.15) is hidden by the mask (u < 0.8), none replaced or kept (line 18)."
"""BERT's masking from a counter-based generator: 15 % are chosen; of them 80 % hidden, 10 % another word, 10 % kept."""
import torch

from veriformer.properties import Subject

PAD, MASK, CLS = 0, 1, 2


class Philox:
    """A stream of uniforms that is a function of (seed, offset), as in a fused kernel."""

    def __init__(self, seed):
        self.seed = seed
        self.offset = 0

    def uniform(self, shape):
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B1 + self.offset * 0x85EBCA77) % 2**63)
        return torch.rand(shape, generator=generator, dtype=torch.float64)


class MaskTokens:
    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size = vocab_size
        self.probability = probability

    def __call__(self, tokens, seed):
        random = Philox(seed)
        special = (tokens == PAD) | (tokens == MASK) | (tokens == CLS)
        chosen = (random.uniform(tokens.shape) < self.probability) & ~special

        action = random.uniform(tokens.shape)
        words = (random.uniform(tokens.shape) * self.vocab_size).long()
        inputs = torch.where(chosen & (action < 0.8), MASK, tokens)
        inputs = torch.where(chosen & (action >= 0.8) & (action < 0.9), words, inputs)
        labels = torch.where(chosen, tokens, -100)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="masking by Philox",
    build=lambda c: MaskTokens(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": [PAD, MASK, CLS], "mask_probability": 0.15},
)
