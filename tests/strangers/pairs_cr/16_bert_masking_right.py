"""BERT's masking: 15 % of the tokens are to be predicted; of these 80 % are hidden, 10 % replaced, 10 % left as they are."""
import torch
from torch import nn
from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = (PAD, CLS, SEP, MASK)


class Masker(nn.Module):
    def __init__(self, vocab_size, probability=0.15):
        super().__init__()
        if vocab_size <= len(SPECIAL):
            raise ValueError("no ordinary tokens")
        self.vocab_size, self.probability = vocab_size, probability

    def forward(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        special = torch.isin(tokens, torch.tensor(SPECIAL))
        picked = (torch.rand(tokens.shape, generator=g) < self.probability) & ~special
        fate = torch.rand(tokens.shape, generator=g)
        hidden = picked & (fate < 0.8)
        swapped = picked & (fate >= 0.8) & (fate < 0.9)
        others = torch.randint(len(SPECIAL), self.vocab_size, tokens.shape, generator=g)
        inputs = tokens.masked_fill(hidden, MASK)
        inputs = torch.where(swapped, others, inputs)
        labels = tokens.masked_fill(~picked, -100)
        return inputs, labels


subject = Subject(
    kind="masking",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
