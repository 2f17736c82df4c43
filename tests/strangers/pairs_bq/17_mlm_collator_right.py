import torch

from veriformer.properties import Subject


class MaskedLMCollator:
    pad, cls, sep, mask = 0, 1, 2, 3
    ignore = -100

    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size, self.probability = vocab_size, probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(seed)
        special = (tokens == self.pad) | (tokens == self.cls) | (tokens == self.sep)
        chosen = (torch.rand(tokens.shape, generator=g) < self.probability) & ~special
        dice = torch.rand(tokens.shape, generator=g)
        words = torch.randint(self.mask + 1, self.vocab_size, tokens.shape, generator=g)
        inputs = tokens.clone()
        inputs[chosen & (dice < 0.8)] = self.mask
        swap = chosen & (dice >= 0.8) & (dice < 0.9)
        inputs[swap] = words[swap]
        labels = tokens.masked_fill(~chosen, self.ignore)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="masked language model collator",
    build=lambda c: MaskedLMCollator(c.vocab_size),
    forward=lambda collate, tokens, seed: collate(tokens, seed),
    declares={"mask_id": 3, "special_ids": (0, 1, 2), "mask_probability": 0.15, "ignore_index": -100},
)
