"""Parts that no textbook has, described by what was measured: their parameters, shapes and constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.judge import Judge


class Cosine(nn.Module):
    """Attention by cosines over a temperature that is trained, its weights cubed sigmoids that sum to one."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.batch_first = heads, True
        self.temperature = nn.Parameter(torch.full((heads,), 7.0))
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        raised = (q @ k.mT * self.temperature[:, None, None]).sigmoid() ** 3
        weights = raised / raised.sum(-1, keepdim=True)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), None


class Bend(nn.Module):
    """A gain and a sine."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.sin(x)


class Odd(nn.TransformerEncoderLayer):
    """torch's layer with another attention, and a part of its own behind the network."""

    def __init__(self, d_model: int = 8, num_heads: int = 2, d_ff: int = 20) -> None:
        super().__init__(d_model, num_heads, d_ff, 0.0, batch_first=True)
        self.self_attn = Cosine(d_model, num_heads)  # type: ignore[assignment]
        self.bend = Bend(d_model)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.norm1(x + self.self_attn(x)[0])
        made: Tensor = self.norm2(x + self.bend(self.linear2(torch.relu(self.linear1(x)))))
        return made


def test_an_odd_attention_and_a_part_of_no_name_are_described() -> None:
    parts = Judge(as_subject(Odd, kind="layer"), Settings(profile="quick")).anatomy()
    attention = next(p for p in parts if p.part == "attention")
    assert attention.place == "self_attn"
    assert "follow its scores by no one factor" in attention.words
    assert "temperature [2]" in attention.words
    assert attention.measured["parameters"]["qkv.weight"] == [24, 8]
    assert attention.measured["heads"] == 2
    bend = next(p for p in parts if p.part == "other")
    assert (bend.place, bend.measured["parameters"], bend.measured["class"]) == ("bend", {"gain": [8]}, "Bend")
    assert bend.words.startswith("Bend with gain [8]: what it gives is ")
    assert {"attention", "norm", "other"} <= {p.part for p in parts}
