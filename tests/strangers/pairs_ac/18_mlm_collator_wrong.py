WHAT = "masked_fill without underscore, its result unused: special tokens are hidden and predicted like others (line 23)."
"""Masking for the generator of ELECTRA, as the collator for masked language modelling does it."""

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3


class MaskTokens:
    def __init__(self, vocab_size, mlm_probability=0.15):
        if vocab_size <= MASK + 1:
            raise ValueError("no ordinary tokens in the vocabulary")
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability

    def __call__(self, inputs, seed):
        generator = torch.Generator().manual_seed(int(seed))
        inputs, labels = inputs.clone(), inputs.clone()
        special_tokens_mask = torch.isin(inputs, torch.tensor([PAD, CLS, SEP, MASK]))
        probability_matrix = torch.full(inputs.shape, self.mlm_probability)
        probability_matrix.masked_fill(special_tokens_mask, value=0.0)
        masked_indices = torch.bernoulli(probability_matrix, generator=generator).bool()
        labels[~masked_indices] = -100  # only these are to be predicted

        # of ten, eight become [MASK], one a random token, one stays
        draw = torch.rand(inputs.shape, generator=generator)
        inputs[masked_indices & (draw < 0.8)] = MASK
        random_indices = masked_indices & (draw >= 0.8) & (draw < 0.9)
        random_tokens = torch.randint(MASK + 1, self.vocab_size, inputs.shape, generator=generator)
        inputs[random_indices] = random_tokens[random_indices]
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: MaskTokens(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={
        "mask_id": MASK,
        "special_ids": [PAD, CLS, SEP, MASK],
        "mask_probability": 0.15,
        "ignore_index": -100,
    },
)
