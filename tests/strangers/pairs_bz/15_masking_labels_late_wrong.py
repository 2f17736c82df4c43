WHAT = "The labels are copied after the random words have been put in, so those positions are to predict the random word instead of the original (line 25)"
"""BERT's masked language modelling: 15 % are predicted; of these 80 % [MASK], 10 % random, 10 % as they are."""
import torch

from veriformer.properties import Subject

MASK, SPECIAL = 4, (0, 2, 3)


class MaskingCollator:
    def __init__(self, vocab_size, probability=0.15):
        if vocab_size <= MASK + 1:
            raise ValueError("the vocabulary has no words")
        self.vocab_size, self.probability = vocab_size, probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        inputs = tokens.clone()
        special = torch.isin(tokens, torch.tensor(SPECIAL))
        chosen = (torch.rand(tokens.shape, generator=g) < self.probability) & ~special
        dice = torch.rand(tokens.shape, generator=g)
        random_words = torch.randint(self.vocab_size, tokens.shape, generator=g)
        swapped = chosen & (dice >= 0.8) & (dice < 0.9)
        inputs[swapped] = random_words[swapped]
        labels = inputs.masked_fill(~chosen, -100)
        inputs[chosen & (dice < 0.8)] = MASK
        return inputs, labels


subject = Subject(
    kind="masking",
    name="bert masking",
    build=lambda c: MaskingCollator(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
