WHAT = "line 29: of the hidden tokens that are not replaced by [MASK] only one in ten becomes a random token where it must be one in two, which gives 2 percent random and 18 percent kept instead of 10 and 10"
"""BERT's masking: 15 percent are to be predicted; of these 80 percent are hidden, 10 percent random, 10 percent kept."""

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = range(4)
SPECIAL = (PAD, CLS, SEP, MASK)


class Collator:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size, self.mlm_probability = vocab_size, mlm_probability

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)

        def chance(p):
            return torch.rand(tokens.shape, generator=generator).to(tokens.device) < p

        special = torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
        predicted = chance(self.mlm_probability) & ~special
        labels = tokens.masked_fill(~predicted, -100)

        replaced = chance(0.8) & predicted
        inputs = tokens.masked_fill(replaced, MASK)

        random = chance(0.1) & predicted & ~replaced
        words = torch.randint(len(SPECIAL), self.vocab_size, tokens.shape, generator=generator).to(tokens.device)
        return torch.where(random, words, inputs), labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
