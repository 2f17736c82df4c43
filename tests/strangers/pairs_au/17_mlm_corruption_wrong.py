WHAT = 'the tenth for random words is taken of the fifth that is left over (0.1 instead of 0.5, line 30): 80/2/18 instead of 80/10/10'
"""BERT's corruption: of 15 % of the tokens 80 % become [MASK], 10 % a random token, 10 % stay."""
import torch

from veriformer.properties import Subject

PAD, MASK = 0, 1


class DataCollatorForMLM:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability

    def __call__(self, inputs, seed):
        generator = torch.Generator().manual_seed(int(seed))
        inputs, labels = inputs.clone(), inputs.clone()

        special = (inputs == PAD) | (inputs == MASK)
        probability_matrix = torch.full(labels.shape, self.mlm_probability).masked_fill(special, 0.0)
        masked_indices = torch.bernoulli(probability_matrix, generator=generator).bool()
        labels[~masked_indices] = -100  # We only compute loss on masked tokens

        # 80% of the time, we replace masked input tokens with the mask token
        indices_replaced = torch.bernoulli(torch.full(labels.shape, 0.8), generator=generator).bool() & masked_indices
        inputs[indices_replaced] = MASK

        # 10% of the time, we replace masked input tokens with random word
        indices_random = (
            torch.bernoulli(torch.full(labels.shape, 0.1), generator=generator).bool() & masked_indices & ~indices_replaced
        )
        random_words = torch.randint(2, self.vocab_size, labels.shape, generator=generator)
        inputs[indices_random] = random_words[indices_random]

        # The rest of the time (10% of the time) we keep the masked input tokens unchanged
        return inputs, labels


subject = Subject(
    kind="masking",
    name="DataCollatorForMLM",
    build=lambda c: DataCollatorForMLM(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, MASK), "mask_probability": 0.15, "ignore_index": -100},
)
