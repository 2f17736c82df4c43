WHAT = "BERT's 80/10/10: the draw for random tokens is not kept off those that were masked already, so half of all chosen tokens become random and 40 % are masked (line 27)"
import torch

from veriformer.properties import Subject

SPECIAL, MASK = (0, 1), 2


class Collator:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size, self.mlm_probability = vocab_size, mlm_probability

    def torch_mask_tokens(self, inputs, seed):
        generator = torch.Generator().manual_seed(int(seed))

        def coin(p):
            return torch.bernoulli(torch.full(inputs.shape, p), generator=generator).bool()

        inputs, labels = inputs.clone(), inputs.clone()
        special = torch.isin(labels, torch.tensor((*SPECIAL, MASK)))
        masked_indices = coin(self.mlm_probability) & ~special
        labels[~masked_indices] = -100

        indices_replaced = coin(0.8) & masked_indices
        inputs[indices_replaced] = MASK

        indices_random = coin(0.5) & masked_indices
        random_words = torch.randint(self.vocab_size, inputs.shape, generator=generator)
        inputs[indices_random] = random_words[indices_random]
        return inputs, labels


subject = Subject(
    kind="masking",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda m, tokens, seed: m.torch_mask_tokens(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (*SPECIAL, MASK), "mask_probability": 0.15, "ignore_index": -100},
)
