WHAT = 'Labels are kept where the input differs from the token (`torch.where(inputs != tokens, ...)`), not where it was chosen: the tenth that stays as it is is never predicted.'
import torch

from veriformer.properties import Subject

SPECIAL_IDS = (0, 1, 2)
MASK_ID = 3


class DataCollatorForLanguageModeling:
    """80 % of the chosen tokens become [MASK], 10 % a random one, 10 % stay; all of the chosen are to be predicted."""

    def __init__(self, vocab_size, mlm_probability=0.15):
        if vocab_size <= MASK_ID:
            raise ValueError("no room for the special tokens")
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        shape = tokens.shape
        special = torch.isin(tokens, torch.tensor((*SPECIAL_IDS, MASK_ID)))
        probability = torch.full(shape, self.mlm_probability).masked_fill(special, 0.0)
        chosen = torch.bernoulli(probability, generator=g).bool()

        inputs = tokens.clone()
        replaced = torch.bernoulli(torch.full(shape, 0.8), generator=g).bool() & chosen
        inputs[replaced] = MASK_ID
        randomised = torch.bernoulli(torch.full(shape, 0.5), generator=g).bool() & chosen & ~replaced
        random_words = torch.randint(self.vocab_size, shape, generator=g)
        inputs[randomised] = random_words[randomised]

        labels = torch.where(inputs != tokens, tokens, -100)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="masked language modelling",
    build=lambda c: DataCollatorForLanguageModeling(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK_ID, "special_ids": (*SPECIAL_IDS, MASK_ID), "mask_probability": 0.15},
)
