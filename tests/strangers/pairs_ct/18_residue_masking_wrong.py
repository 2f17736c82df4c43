"""Masked residues for a protein language model: of what is chosen 80 % hidden, 10 % another residue, 10 % as it is."""
import torch

from veriformer.properties import Subject

CLS, EOS, PAD, MASK = 0, 1, 2, 3
FIRST = 4
SHARE = 0.15


class Masker:
    def __init__(self, vocab_size):
        if vocab_size <= FIRST:
            raise ValueError("no residues")
        self.vocab_size = vocab_size

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))

        def coin(p):
            return torch.rand(tokens.shape, generator=g) < p

        real = (tokens != CLS) & (tokens != EOS) & (tokens != PAD)
        chosen = coin(SHARE) & real
        labels = torch.where(chosen, tokens, -100)
        hidden = chosen & coin(0.8)
        swapped = chosen & coin(0.5)
        other = torch.randint(FIRST, self.vocab_size, tokens.shape, generator=g)
        inputs = torch.where(hidden, MASK, tokens)
        inputs = torch.where(swapped, other, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="residue masking",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (CLS, EOS, PAD), "mask_probability": SHARE},
)

WHAT = 'What is swapped for another residue is not kept apart from what is hidden (line 27): half of the chosen ones are random, 40 % are hidden.'
