"""BERT's masking: 15 % of the tokens are to be predicted; of these 80 % become [MASK], 10 % a random token, 10 % stay."""

import torch

from veriformer.properties import Subject

WHAT = "Labels are set where input and token differ, so the chosen tokens that were left as they are are not predicted."
CAUSE = (
    "The labels are derived from `inputs != tokens` after the replacement instead of from the choice itself: the 10 % "
    "that stay (and random tokens that hit the original) get ignore_index, so no label ever stands on an unchanged "
    "input and 13.5 % instead of 15 % are predicted."
)

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = (PAD, CLS, SEP, MASK)
IGNORE = -100


def choose(tokens, probability, generator):
    """Which tokens are to be predicted: never a special one."""
    special = torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
    drawn = torch.rand(tokens.shape, generator=generator, device=tokens.device) < probability
    return drawn & ~special


def corrupt(tokens, chosen, vocab_size, generator):
    """Hide the chosen ones: 80 % masked, 10 % at random, 10 % as they are."""
    fate = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    random = torch.randint(len(SPECIAL), vocab_size, tokens.shape, generator=generator, device=tokens.device)
    inputs = torch.where(chosen & (fate < 0.8), MASK, tokens)
    return torch.where(chosen & (fate >= 0.8) & (fate < 0.9), random, inputs)


def labels_of_choice(tokens, inputs, chosen):
    return torch.where(chosen, tokens, IGNORE)


def labels_of_change(tokens, inputs, chosen):
    return torch.where(inputs != tokens, tokens, IGNORE)


class Collator:
    def __init__(self, vocab_size, labels, probability=0.15):
        if vocab_size <= len(SPECIAL):
            raise ValueError("there is no ordinary token to draw")
        self.vocab_size, self.labels, self.probability = vocab_size, labels, probability

    def __call__(self, tokens, seed):
        generator = torch.Generator(device=tokens.device).manual_seed(int(seed))
        chosen = choose(tokens, self.probability, generator)
        inputs = corrupt(tokens, chosen, self.vocab_size, generator)
        return inputs, self.labels(tokens, inputs, chosen)


def subject(labels):
    return Subject(
        kind="masking",
        name=labels.__name__,
        build=lambda c: Collator(c.vocab_size, labels),
        forward=lambda m, tokens, seed: m(tokens, seed),
        declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": IGNORE},
    )


right = subject(labels_of_choice)
wrong = subject(labels_of_change)
