"""Symmetric ALiBi for an encoder, with the slopes of the authors' code for any number of heads."""
import torch
from torch import nn
from veriformer.properties import Subject


def slopes(n):
    def power_of_two(m):
        start = 2.0 ** (-8.0 / m)
        return [start ** (i + 1) for i in range(m)]

    closest = 1
    while closest * 2 <= n:
        closest *= 2
    if closest == n:
        return power_of_two(n)
    return power_of_two(closest) + power_of_two(2 * closest)[0::2][: n - closest]


class EncoderAlibi(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(slopes(heads), dtype=torch.float64), persistent=False)

    def forward(self, length, keys):
        if length != keys:
            raise ValueError("an encoder has as many queries as keys")
        at = torch.arange(length, device=self.slopes.device)
        return -self.slopes[:, None, None] * (at[:, None] - at[None, :]).abs()


subject = Subject(
    kind="position_bias",
    name="ALiBi of an encoder",
    build=lambda c: EncoderAlibi(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "alibi", "slopes": "interleaved", "equal_lengths": True},
)
