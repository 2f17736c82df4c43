"""BERT's masking for a course notebook: 15 % chosen; of these 80 % [MASK], 10 % random, 10 % as they are."""
import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3


class Collator:
    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size, self.probability = vocab_size, probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        coin = lambda p: torch.rand(tokens.shape, generator=g).to(tokens.device) < p
        special = torch.isin(tokens, torch.tensor([PAD, CLS, SEP, MASK], device=tokens.device))
        chosen = coin(self.probability) & ~special
        labels = torch.where(chosen, tokens, -100)
        masked = chosen & coin(0.8)
        replaced = chosen & ~masked & coin(0.1)
        words = torch.randint(self.vocab_size, tokens.shape, generator=g).to(tokens)
        inputs = torch.where(masked, MASK, torch.where(replaced, words, tokens))
        return inputs, labels


subject = Subject(
    kind="masking",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, CLS, SEP, MASK), "mask_probability": 0.15},
)

WHAT = 'The coin for random words is tossed among the 20 % that were not masked, so it has to be 0.5; with 0.1 only 2 % of the chosen tokens are replaced and 18 % stay as they are (line 20).'
