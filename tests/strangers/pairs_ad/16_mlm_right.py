"""BERT's masking: 15 % of the tokens are predicted; of these 80 % [MASK], 10 % a random token, 10 % as they were."""

import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = (PAD, CLS, SEP, MASK)


class DataCollatorForMLM:
    def __init__(self, vocab_size, mlm_probability=0.15):
        if vocab_size <= len(SPECIAL):
            raise ValueError("no ordinary tokens in this vocabulary")
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability

    def torch_mask_tokens(self, inputs, generator):
        inputs, labels = inputs.clone(), inputs.clone()
        special = torch.isin(labels, torch.tensor(SPECIAL))
        probability_matrix = torch.full(labels.shape, self.mlm_probability).masked_fill_(special, 0.0)
        masked_indices = torch.bernoulli(probability_matrix, generator=generator).bool()
        labels[~masked_indices] = -100

        # 80 %: [MASK]
        replaced = torch.bernoulli(torch.full(labels.shape, 0.8), generator=generator).bool() & masked_indices
        inputs[replaced] = MASK

        # 10 %: a random token
        randomized = torch.bernoulli(torch.full(labels.shape, 0.5), generator=generator).bool()
        randomized &= masked_indices & ~replaced
        random_words = torch.randint(len(SPECIAL), self.vocab_size, labels.shape, generator=generator)
        inputs[randomized] = random_words[randomized]

        # the last 10 %: unchanged
        return inputs, labels


subject = Subject(
    kind="masking",
    name="DataCollatorForMLM",
    build=lambda c: DataCollatorForMLM(c.vocab_size),
    forward=lambda m, tokens, seed: m.torch_mask_tokens(tokens, torch.Generator().manual_seed(int(seed))),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
