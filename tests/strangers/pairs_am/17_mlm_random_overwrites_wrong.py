WHAT = 'Random words are drawn among all chosen positions, those already replaced by [MASK] included: 40 % stay [MASK] and 50 % become random instead of 80 and 10 (line 28).'
import torch

from veriformer.properties import Subject


class MLMCollator:
    """BERT masking: 15 % are predicted; of these 80 % -> [MASK], 10 % -> a random word, 10 % as they are."""

    def __init__(self, vocab_size, mask_id=3, special_ids=(0, 1, 2, 3), mlm_probability=0.15):
        self.vocab_size, self.mask_id = vocab_size, mask_id
        self.special_ids, self.mlm_probability = special_ids, mlm_probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(seed)

        def coin(p):
            return torch.rand(tokens.shape, generator=g) < p

        inputs, labels = tokens.clone(), tokens.clone()
        special = torch.isin(tokens, torch.tensor(self.special_ids))
        chosen = coin(self.mlm_probability) & ~special
        labels[~chosen] = -100

        replaced = coin(0.8) & chosen
        inputs[replaced] = self.mask_id

        randomised = coin(0.5) & chosen
        words = torch.randint(len(self.special_ids), self.vocab_size, tokens.shape, generator=g)
        inputs[randomised] = words[randomised]
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: MLMCollator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": 3, "special_ids": (0, 1, 2, 3), "mask_probability": 0.15, "ignore_index": -100},
)
