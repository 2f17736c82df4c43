"""BERT's masking with explicit keys, as in JAX: every draw has a key of its own, split from the seed."""

import torch

from veriformer.properties import Subject

SPECIAL_IDS = (0, 1, 2, 3)
MASK_ID = 3


def split(key, count):
    """`count` new keys from one."""
    generator = torch.Generator().manual_seed(key)
    return torch.randint(0, 2**62, (count,), generator=generator).tolist()


def uniform(key, shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(key))


def randint(key, shape, low, high):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(key))


class Masker:
    def __init__(self, vocab_size, rate=0.15):
        self.vocab_size, self.rate = vocab_size, rate

    def __call__(self, tokens, seed):
        pick_key, kind_key, word_key = split(seed, 3)
        special = torch.isin(tokens, torch.tensor(SPECIAL_IDS, device=tokens.device))
        picked = (uniform(pick_key, tokens.shape).to(tokens.device) < self.rate) & ~special
        labels = torch.where(picked, tokens, -100)
        kind = uniform(kind_key, tokens.shape).to(tokens.device)
        words = randint(word_key, tokens.shape, len(SPECIAL_IDS), self.vocab_size).to(tokens.device)
        inputs = torch.where(picked & (kind < 0.8), MASK_ID, tokens)
        inputs = torch.where(picked & (kind >= 0.8) & (kind < 0.9), words, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="masking with keys",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK_ID, "special_ids": SPECIAL_IDS, "mask_probability": 0.15, "ignore_index": -100},
)
