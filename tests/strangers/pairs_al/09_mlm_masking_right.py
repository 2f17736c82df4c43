import torch
from veriformer.properties import Subject

MASK, SPECIAL, P = 4, (0, 1, 2, 3, 4), 0.15


class Collator:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)

        def uniform():
            g = generator
            return torch.rand(tokens.shape, generator=g)

        special = torch.isin(tokens, torch.tensor(SPECIAL))
        chosen = (uniform() < P) & ~special
        labels = torch.where(chosen, tokens, torch.full_like(tokens, -100))
        how = uniform()
        inputs = torch.where(chosen & (how < 0.8), torch.full_like(tokens, MASK), tokens)
        words = torch.randint(5, self.vocab_size, tokens.shape, generator=generator)
        inputs = torch.where(chosen & (how >= 0.8) & (how < 0.9), words, inputs)
        return inputs, labels


subject = Subject(
    kind="masking", name="collator", build=lambda c: Collator(c.vocab_size), forward=lambda m, tokens, seed: m(tokens, seed),
    domain={"vocab_size": [40, 100]},
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": P, "ignore_index": -100},
)
