WHAT = "labels are kept only where [MASK] was written, so that the chosen tokens that were replaced at random or kept are not predicted: 12 % have a label instead of 15 % (line 32)."
import torch

from veriformer.properties import Subject

PAD, MASK = 0, 1


class MaskedLanguageCollator:
    """80 % [MASK], 10 % a random token, 10 % as it was."""

    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(int(seed))

        def draw(p):
            return (torch.rand(tokens.shape, generator=generator) < p).to(tokens.device)

        inputs = tokens.clone()
        special = (tokens == PAD) | (tokens == MASK)
        chosen = draw(self.mlm_probability) & ~special
        replaced = draw(0.8) & chosen
        randomised = draw(0.5) & chosen & ~replaced
        noise = torch.randint(2, self.vocab_size, tokens.shape, generator=generator).to(tokens)

        inputs[replaced] = MASK
        inputs[randomised] = noise[randomised]
        labels = tokens.clone()
        labels[inputs != MASK] = -100
        return inputs, labels


subject = Subject(
    kind="masking",
    name="BERT's masking",
    build=lambda c: MaskedLanguageCollator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, MASK), "mask_probability": 0.15, "ignore_index": -100},
)
