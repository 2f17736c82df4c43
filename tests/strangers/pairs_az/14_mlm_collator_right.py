"""What a data collator does for masked language modelling: 15 %, of these 80 / 10 / 10."""

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = (PAD, CLS, SEP, MASK)


class Collator:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability

    def torch_mask_tokens(self, inputs, seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = inputs.clone()

        def flips(p):
            return torch.rand(inputs.shape, generator=generator) < p

        special_tokens_mask = torch.isin(inputs, torch.tensor(SPECIAL))
        masked_indices = flips(self.mlm_probability) & ~special_tokens_mask
        labels = inputs.masked_fill(~masked_indices, -100)  # loss on masked tokens alone

        # 80 % of the time the token becomes [MASK]
        indices_replaced = flips(0.8) & masked_indices
        inputs[indices_replaced] = MASK

        # 10 % of the time a random word: half of what is left
        indices_random = flips(0.5) & masked_indices & ~indices_replaced
        random_words = torch.randint(self.vocab_size, inputs.shape, generator=generator)
        inputs[indices_random] = random_words[indices_random]

        # the other 10 % stay as they are
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda m, tokens, seed: m.torch_mask_tokens(tokens, seed),
    declares={
        "mask_id": MASK,
        "special_ids": SPECIAL,
        "mask_probability": 0.15,
        "ignore_index": -100,
    },
)
