"""Masked language modelling: 15 % are predicted, of which 80 % are hidden, 10 % replaced, 10 % left."""

import torch

from veriformer.properties import Subject

MASK_ID = 4
SPECIAL_IDS = (0, 1, 2, 3, 4)


class DataCollatorForMLM:
    def __init__(self, vocab_size, mlm_probability=0.15):
        if vocab_size <= len(SPECIAL_IDS):
            raise ValueError("no ordinary tokens in the vocabulary")
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability

    def mask_tokens(self, inputs, generator):
        inputs, labels = inputs.clone(), inputs.clone()
        probability_matrix = torch.full(labels.shape, self.mlm_probability)
        special_tokens_mask = torch.isin(labels, torch.tensor(SPECIAL_IDS))
        probability_matrix.masked_fill_(special_tokens_mask, value=0.0)
        masked_indices = torch.bernoulli(probability_matrix, generator=generator).bool()
        labels[~masked_indices] = -100

        # 80% of the time, we replace masked input tokens with [MASK]
        coin = torch.bernoulli(torch.full(labels.shape, 0.8), generator=generator).bool()
        indices_replaced = coin & masked_indices
        inputs[indices_replaced] = MASK_ID

        # 10% of the time, we replace masked input tokens with a random word
        coin = torch.bernoulli(torch.full(labels.shape, 0.5), generator=generator).bool()
        indices_random = coin & masked_indices & ~indices_replaced
        random_words = torch.randint(self.vocab_size, labels.shape, generator=generator, dtype=inputs.dtype)
        inputs[indices_random] = random_words[indices_random]

        # the rest of the time (10% of the time) we keep the masked input tokens unchanged
        return inputs, labels


def forward(model, tokens, seed):
    return model.mask_tokens(tokens, torch.Generator().manual_seed(int(seed)))


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: DataCollatorForMLM(c.vocab_size),
    forward=forward,
    declares={"mask_id": MASK_ID, "special_ids": SPECIAL_IDS, "mask_probability": 0.15, "ignore_index": -100},
)
