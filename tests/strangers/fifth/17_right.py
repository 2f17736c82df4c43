"""Masking for a masked language model, after BERT: of the chosen 15 %, 80 % are hidden, 10 % random, 10 % left as they are."""

import torch

from veriformer.properties import Subject

CLS, SEP, PAD, MASK = 0, 1, 2, 3


class DataCollatorForLanguageModeling:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability
        self.special_ids = (CLS, SEP, PAD, MASK)
        self.mask_token_id = MASK

    def mask_tokens(self, inputs, generator=None):
        inputs = inputs.clone()
        labels = inputs.clone()
        probability_matrix = torch.full(labels.shape, self.mlm_probability)
        special_tokens_mask = torch.isin(labels, torch.tensor(self.special_ids))
        probability_matrix.masked_fill_(special_tokens_mask, value=0.0)
        masked_indices = torch.bernoulli(probability_matrix, generator=generator).bool()
        labels[~masked_indices] = -100

        # 80 % of the time: [MASK]
        indices_replaced = torch.bernoulli(torch.full(labels.shape, 0.8), generator=generator).bool() & masked_indices
        inputs[indices_replaced] = self.mask_token_id

        # 10 % of the time: a random token
        indices_random = (
            torch.bernoulli(torch.full(labels.shape, 0.5), generator=generator).bool()
            & masked_indices
            & ~indices_replaced
        )
        random_words = torch.randint(self.vocab_size, labels.shape, generator=generator, dtype=inputs.dtype)
        inputs[indices_random] = random_words[indices_random]

        # the rest of the time (10 %) the token stays
        return inputs, labels


def forward(collator, tokens, seed):
    return collator.mask_tokens(tokens, torch.Generator().manual_seed(seed))


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: DataCollatorForLanguageModeling(c.vocab_size),
    forward=forward,
    declares={
        "mask_id": MASK,
        "special_ids": (CLS, SEP, PAD, MASK),
        "mask_probability": 0.15,
        "ignore_index": -100,
    },
)
