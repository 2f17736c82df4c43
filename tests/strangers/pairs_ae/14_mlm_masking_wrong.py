WHAT = "Random tokens are drawn with 0.1 among the chosen that were not masked instead of 0.5, so the shares are 80 / 2 / 18 and not 80 / 10 / 10 (line 32)."
"""BERT's corruption: 15 % of the tokens are predicted; of these 80 % masked, 10 % random, 10 % left as they are."""

import torch

from veriformer.properties import Subject

PAD, MASK, CLS = 0, 1, 2
SPECIAL = (PAD, MASK, CLS)


class DataCollatorForMLM:
    def __init__(self, vocab_size, mlm_probability=0.15):
        if vocab_size <= len(SPECIAL):
            raise ValueError("nothing but special tokens")
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability

    def torch_mask_tokens(self, inputs, generator):
        inputs, labels = inputs.clone(), inputs.clone()

        def bernoulli(p):
            return torch.rand(labels.shape, generator=generator) < p

        special = torch.isin(labels, torch.tensor(SPECIAL))
        chosen = bernoulli(self.mlm_probability) & ~special
        labels[~chosen] = -100

        replaced = bernoulli(0.8) & chosen
        inputs[replaced] = MASK

        randomised = bernoulli(0.1) & chosen & ~replaced
        words = torch.randint(len(SPECIAL), self.vocab_size, labels.shape, generator=generator)
        inputs[randomised] = words[randomised]
        return inputs, labels


def corrupt(collator, tokens, seed):
    return collator.torch_mask_tokens(tokens, torch.Generator().manual_seed(seed))


subject = Subject(
    kind="masking",
    name="BERT masking",
    build=lambda c: DataCollatorForMLM(c.vocab_size),
    forward=corrupt,
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
