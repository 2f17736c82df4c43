WHAT = "random words are drawn below the length of the sequence instead of below the size of the vocabulary (line 32): from its first T ids alone, or, in long sequences, from ids that do not exist."
"""A collator for masked language modelling: 15 % are predicted; of these 80 % hidden, 10 % random, 10 % kept."""

import torch

from veriformer.properties import Subject

PAD, MASK, SEP = 0, 1, 2


class MaskedLanguageCollator:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability
        self.special_ids = torch.tensor([PAD, MASK, SEP])

    def __call__(self, tokens, seed):
        rng = torch.Generator(device=tokens.device).manual_seed(seed)

        def draw(share):
            return torch.rand(tokens.shape, generator=rng, device=tokens.device) < share

        special = torch.isin(tokens, self.special_ids.to(tokens.device))
        chosen = draw(self.mlm_probability) & ~special
        labels = tokens.masked_fill(~chosen, -100)

        hidden = chosen & draw(0.8)
        inputs = tokens.masked_fill(hidden, MASK)

        # half of what is left gets a random word
        swapped = chosen & ~hidden & draw(0.5)
        words = torch.randint(tokens.size(-1), tokens.shape, generator=rng, device=tokens.device)
        inputs = torch.where(swapped, words, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: MaskedLanguageCollator(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, MASK, SEP), "mask_probability": 0.15, "ignore_index": -100},
)
