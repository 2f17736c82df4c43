"""Masked language modelling, 80 / 10 / 10, with one uniform number a token."""

import numpy as np
import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
P = 0.15


class MaskTokens:
    def __init__(self, vocab_size, probability=P):
        self.vocab_size = vocab_size
        self.probability = probability

    def __call__(self, tokens, seed):
        rng = np.random.default_rng(seed)
        ids = tokens.cpu().numpy().copy()
        special = np.isin(ids, [PAD, CLS, SEP])

        u = rng.random(ids.shape)
        chosen = (u < self.probability) & ~special
        labels = np.where(chosen, ids, -100)

        # below the probability u is uniform still: its share says what becomes of the token
        share = u / self.probability
        hidden = chosen & (share < 0.8)
        swapped = chosen & (share >= 0.8) & (share < 0.9)
        ids[hidden] = MASK
        ids[swapped] = rng.integers(0, self.vocab_size, size=int(swapped.sum()))
        return torch.from_numpy(ids).to(tokens), torch.from_numpy(labels).to(tokens)


subject = Subject(
    kind="masking",
    name="BERT's masking",
    build=lambda c: MaskTokens(c.vocab_size),
    forward=lambda mask, tokens, seed: mask(tokens, seed),
    declares={
        "mask_id": MASK,
        "special_ids": (PAD, CLS, SEP),
        "mask_probability": P,
        "ignore_index": -100,
    },
)
