"""What BERT's collator does to a batch: choose tokens, hide most of them, replace some, leave the rest."""

import torch

from veriformer.properties import Subject

CLS, SEP, MASK = 0, 1, 2
SPECIAL = (CLS, SEP, MASK)
IGNORE = -100


class Collator:
    def __init__(self, vocab_size, share_of_the_rest, probability=0.15):
        self.vocab_size, self.probability = vocab_size, probability
        self.share_of_the_rest = share_of_the_rest

    def coin(self, shape, probability, generator):
        return torch.bernoulli(torch.full(shape, probability), generator=generator).bool()

    def torch_mask_tokens(self, inputs, seed):
        generator = torch.Generator().manual_seed(int(seed))
        inputs, labels = inputs.clone(), inputs.clone()

        special = torch.isin(inputs, torch.tensor(SPECIAL))
        masked = self.coin(labels.shape, self.probability, generator) & ~special
        labels[~masked] = IGNORE

        # 80 % of the time: [MASK]
        replaced = self.coin(labels.shape, 0.8, generator) & masked
        inputs[replaced] = MASK

        # 10 % of the time: a random word
        random = self.coin(labels.shape, self.share_of_the_rest, generator) & masked & ~replaced
        words = torch.randint(len(SPECIAL), self.vocab_size, labels.shape, generator=generator)
        inputs[random] = words.to(inputs.dtype)[random]

        # the rest of the time (10 %) they stay as they are
        return inputs, labels


def subject(name, share_of_the_rest):
    return Subject(
        kind="masking",
        name=name,
        build=lambda c: Collator(c.vocab_size, share_of_the_rest),
        forward=lambda collator, tokens, seed: collator.torch_mask_tokens(tokens, seed),
        declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": IGNORE},
    )


right = subject("bert collator", 0.5)
wrong = subject("bert collator, tenth of the rest", 0.1)

WHAT = "The second coin, thrown only for chosen tokens that were not replaced by [MASK], has 0.1 where 0.5 gives a tenth of all."
CAUSE = (
    "Random words are drawn for 10 % of the remaining 20 %, so that 2 % of the chosen tokens are replaced at random and 18 % are "
    "left as they are, where the paper has 10 % and 10 %."
)
