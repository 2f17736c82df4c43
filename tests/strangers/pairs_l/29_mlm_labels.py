"""BERT's masking: 15 % of the tokens, 80 / 10 / 10."""

import torch

from veriformer.properties import Subject

MASK, SPECIAL = 4, (0, 1, 2, 3, 4)


def masker(labels_of):
    class Collator:
        def __init__(self, vocab_size, mlm_probability=0.15):
            self.vocab_size, self.mlm_probability = vocab_size, mlm_probability

        def __call__(self, tokens, seed):
            g = torch.Generator().manual_seed(int(seed))
            draw = lambda: torch.rand(tokens.shape, generator=g).to(tokens.device)
            special = torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
            chosen = (draw() < self.mlm_probability) & ~special
            fate = draw()
            words = torch.randint(self.vocab_size, tokens.shape, generator=g).to(tokens.device)
            inputs = torch.where(chosen & (fate < 0.8), MASK, tokens)
            inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), words, inputs)
            return inputs, labels_of(tokens, inputs, chosen)

    return Collator


def subject(cls):
    return Subject(
        kind="masking",
        name="mlm",
        build=lambda c: cls(c.vocab_size),
        forward=lambda m, tokens, seed: m(tokens, seed),
        domain={"vocab_size": [500, 1000]},
        declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15},
    )


right = subject(masker(lambda tokens, inputs, chosen: torch.where(chosen, tokens, -100)))
wrong = subject(masker(lambda tokens, inputs, chosen: torch.where((inputs == MASK) & (tokens != MASK), tokens, -100)))
WHAT = "labels are taken where the input is [MASK]: the replaced and the kept fifth are not predicted"
CAUSE = (
    "Only tokens that became the mask token have a label; the 10 % replaced at random and the 10 % left as they are are "
    "chosen but not predicted, so 12 % instead of 15 % are labelled and replaced tokens are mere noise."
)
