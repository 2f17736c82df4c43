import torch

from veriformer.properties import Subject

CLS, MASK = 0, 1


class MLMCollator:
    """BERT's 80 / 10 / 10."""

    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size, self.probability = vocab_size, probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(seed)
        inputs, labels = tokens.clone(), tokens.clone()
        chance = torch.full(tokens.shape, self.probability).masked_fill(tokens == CLS, 0.0)
        chosen = torch.bernoulli(chance, generator=g).bool()
        labels[~chosen] = -100
        fate = torch.rand(tokens.shape, generator=g)
        words = torch.randint(self.vocab_size, tokens.shape, generator=g)
        inputs = torch.where(chosen & (fate < 0.8), MASK, inputs)
        inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), words, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="BERT's masking",
    build=lambda c: MLMCollator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (CLS,), "mask_probability": 0.15},
)
