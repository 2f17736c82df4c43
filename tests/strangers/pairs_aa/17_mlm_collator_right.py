"""BERT's masking, 80 % mask, 10 % random, 10 % left as they are, as a data collator."""

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3


class DataCollatorForLanguageModeling:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability
        self.special = torch.tensor([PAD, CLS, SEP, MASK])

    def torch_mask_tokens(self, inputs, seed):
        generator = torch.Generator().manual_seed(seed)
        inputs, labels = inputs.clone(), inputs.clone()

        # We sample a few tokens in each sequence for MLM training (with probability mlm_probability)
        probability_matrix = torch.full(labels.shape, self.mlm_probability)
        special_tokens_mask = torch.isin(labels, self.special)
        probability_matrix.masked_fill_(special_tokens_mask, value=0.0)
        masked_indices = torch.bernoulli(probability_matrix, generator=generator).bool()
        labels[~masked_indices] = -100  # We only compute loss on masked tokens

        # 80% of the time, we replace masked input tokens with tokenizer.mask_token ([MASK])
        indices_replaced = torch.bernoulli(torch.full(labels.shape, 0.8), generator=generator).bool() & masked_indices
        inputs[indices_replaced] = MASK

        # 10% of the time, we replace masked input tokens with random word
        indices_random = torch.bernoulli(torch.full(labels.shape, 0.5), generator=generator).bool()
        indices_random = indices_random & masked_indices & ~indices_replaced
        random_words = torch.randint(self.vocab_size, labels.shape, dtype=torch.long, generator=generator)
        inputs[indices_random] = random_words[indices_random]

        # The rest of the time (10% of the time) we keep the masked input tokens unchanged
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: DataCollatorForLanguageModeling(c.vocab_size),
    forward=lambda model, tokens, seed: model.torch_mask_tokens(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, CLS, SEP, MASK), "mask_probability": 0.15, "ignore_index": -100},
)
