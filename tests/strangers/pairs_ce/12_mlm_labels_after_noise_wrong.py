WHAT = "In-place masking for MLM: the labels are gathered from the buffer after the random replacement has been written to it, so for a tenth of the chosen tokens the label is the random token and not the original."
import torch

from veriformer.properties import Subject

MASK, SPECIAL, FIRST, VOCAB = 4, (0, 1, 2, 3, 4), 5, 60


class MaskTokens:
    """create_masked_lm_predictions of BERT, vectorised, in place on one buffer."""

    def __init__(self, rate=0.15):
        self.rate = rate

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(int(seed))
        buffer = tokens.clone()
        ordinary = ~torch.isin(tokens, torch.tensor(SPECIAL))
        chosen = (torch.rand(tokens.shape, generator=generator) < self.rate) & ordinary
        lot = torch.rand(tokens.shape, generator=generator)
        noise = torch.randint(FIRST, VOCAB, tokens.shape, generator=generator)
        random = chosen & (lot >= 0.9)
        buffer[random] = noise[random]
        labels = torch.full_like(buffer, -100)
        labels[chosen] = buffer[chosen]
        buffer[chosen & (lot < 0.8)] = MASK
        return buffer, labels


subject = Subject(
    kind="masking",
    name="in-place MLM masking",
    build=lambda c: MaskTokens(),
    forward=lambda m, tokens, seed: m(tokens, seed),
    domain={"vocab_size": [VOCAB]},
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15},
)
