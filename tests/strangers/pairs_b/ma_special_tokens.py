"""BERT's masking: 15% are to be predicted; of those 80% become [MASK] = 3, 10% a random word, 10% stay. Ids 0 to 3 are special."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Masking:
    def __init__(self, vocab, bad):
        self.vocab, self.bad = vocab, bad

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        u, v = torch.rand(tokens.shape, generator=g), torch.rand(tokens.shape, generator=g)
        words = torch.randint(4, self.vocab, tokens.shape, generator=g)
        chosen = u < 0.15
        special = tokens < 4
        if not self.bad:
            chosen = chosen & ~special
        inputs = torch.where(chosen & (v < 0.8), torch.full_like(tokens, 3), tokens)
        inputs = torch.where(chosen & (v >= 0.9), words.to(tokens), inputs)
        labels = tokens.masked_fill(~chosen | special, -100)
        return inputs, labels


def subject(bad):
    return Subject(kind="masking", build=lambda c: Masking(c.vocab_size, bad), forward=lambda m, tokens, seed: m(tokens, seed),
                   domain={"vocab_size": [32, 64]},
                   declares={"mask_id": 3, "special_ids": (0, 1, 2, 3), "mask_probability": 0.15, "ignore_index": -100})


right, wrong = subject(False), subject(True)
WHAT = "Special tokens are kept out of the labels only: in the inputs they are masked or replaced by random words like any other."
PLACE = "choice of the tokens that are hidden (special ids)"
