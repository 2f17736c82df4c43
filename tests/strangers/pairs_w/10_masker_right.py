"""Corruption for masked language modelling: 15 % of the tokens are to be predicted, 80/10/10, special ones never."""

import torch

from veriformer.properties import Subject

PAD, CLS, MASK = 0, 1, 2
SPECIAL = (PAD, CLS, MASK)
UNSEEN = -100


class Masker:
    """Chooses, hides and labels. One seed, one corruption: workers hand theirs in."""

    def __init__(self, vocab_size, probability=0.15, hide=0.8, swap=0.1):
        self.vocab_size = vocab_size
        self.probability = probability
        self.hide, self.swap = hide, swap
        special = torch.zeros(vocab_size, dtype=torch.bool)
        special[list(SPECIAL)] = True
        self.is_special = special
        self.ordinary = torch.arange(vocab_size)[~special]

    def choose(self, tokens, generator):
        """Which tokens are to be predicted."""
        drawn = torch.rand(tokens.shape, generator=generator) < self.probability
        return drawn & ~self.is_special[tokens]

    def substitutes(self, shape, generator):
        """Any ordinary token, each as often as any other."""
        which = torch.randint(len(self.ordinary), shape, generator=generator)
        return self.ordinary[which]

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(int(seed))
        chosen = self.choose(tokens, generator)
        fate = torch.rand(tokens.shape, generator=generator)
        hidden = chosen & (fate < self.hide)
        swapped = chosen & (fate >= self.hide) & (fate < self.hide + self.swap)
        inputs = torch.where(hidden, MASK, tokens)
        inputs = torch.where(swapped, self.substitutes(tokens.shape, generator), inputs)
        labels = torch.where(chosen, tokens, UNSEEN)
        return inputs, labels


def forward(model, tokens, seed):
    return model(tokens, seed)


subject = Subject(
    kind="masking",
    name="80/10/10 masker",
    build=lambda c: Masker(c.vocab_size),
    forward=forward,
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": UNSEEN},
)
