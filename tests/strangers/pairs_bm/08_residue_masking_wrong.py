WHAT = "labels are made where the input was changed (inputs != tokens) instead of where a position was chosen: the 10 % that are kept as they are are never predicted, and 13.5 % instead of 15 % have a label"
"""Masked residues for a protein language model: 15 %, of which 80 % <mask>, 10 % another residue, 10 % as they are."""
import torch

from veriformer.properties import Subject

PAD, CLS, EOS, MASK = 0, 1, 2, 3


class ResidueCollator:
    def __init__(self, alphabet_size, probability=0.15):
        self.size, self.probability = alphabet_size, probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(seed)
        residue = tokens > MASK
        chosen = (torch.rand(tokens.shape, generator=g) < self.probability) & residue
        action = torch.rand(tokens.shape, generator=g)
        noise = torch.randint(MASK + 1, self.size, tokens.shape, generator=g)

        inputs = tokens.clone()
        inputs[chosen & (action < 0.8)] = MASK
        swap = chosen & (action >= 0.8) & (action < 0.9)
        inputs[swap] = noise[swap]

        labels = torch.where(inputs != tokens, tokens, torch.full_like(tokens, -100))
        return inputs, labels


subject = Subject(
    kind="masking",
    name="residue masking",
    build=lambda c: ResidueCollator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, CLS, EOS, MASK), "mask_probability": 0.15, "ignore_index": -100},
)
