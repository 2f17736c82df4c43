"""BERT's masking as a data collator that is reproducible: all that it draws comes from the seed that it is given."""
from dataclasses import dataclass

import torch

from veriformer.properties import Subject

SPECIALS = (0, 1, 2, 3)
MASK = 3


@dataclass
class MLMCollator:
    vocab_size: int
    mlm_probability: float = 0.15
    mask_id: int = MASK
    special_ids: tuple = SPECIALS

    def bernoulli(self, p, shape, generator):
        return torch.rand(shape, generator=generator) < p

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(int(seed))
        inputs, labels = tokens.clone(), tokens.clone()
        special = torch.isin(tokens, torch.tensor(self.special_ids, device=tokens.device))
        chosen = self.bernoulli(self.mlm_probability, tokens.shape, generator).to(tokens.device) & ~special
        labels[~chosen] = -100
        # 80 % become [MASK], half of the rest a random token, the others stay
        hidden = self.bernoulli(0.8, tokens.shape, generator).to(tokens.device) & chosen
        inputs[hidden] = self.mask_id
        noised = self.bernoulli(0.5, tokens.shape, generator).to(tokens.device) & chosen & ~hidden
        words = torch.randint(self.vocab_size, tokens.shape, generator=generator).to(tokens)
        inputs[noised] = words[noised]
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: MLMCollator(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIALS, "mask_probability": 0.15, "ignore_index": -100},
)
