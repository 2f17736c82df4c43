"""What is done twice, in another way in one layer, or without a module: asked about or failed; right twins pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties import DrawnConfig, Subject, check
from veriformer.properties.results.records import Result

_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda gate, up: functional.silu(gate) * up,
    "both halves": lambda gate, up: functional.silu(gate) * functional.silu(up),
    "product": lambda gate, up: functional.silu(gate * up),
    "added": lambda gate, up: functional.silu(gate) + up,
    "sum": lambda gate, up: functional.silu(gate + up),
    "twice": lambda gate, up: functional.silu(functional.silu(gate)),
    "factor": lambda gate, up: 1.1 * functional.silu(gate) * up,
}


class Layer(nn.Module):
    """A pre-LN layer with a slip, or none."""

    def __init__(self, c: DrawnConfig, slip: str, number: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True)
        self.norm1 = nn.LayerNorm(c.d_model)
        self.norm2 = nn.LayerNorm(c.d_model, eps=1e-2 if slip == "eps" and number == 0 else 1e-5)
        self.again = nn.LayerNorm(c.d_model)
        self.gate, self.up = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_model, c.d_ff)
        self.down = nn.Linear(c.d_ff, c.d_model)
        self.slip, self.number = slip, number

    def normalised(self, x: Tensor) -> Tensor:
        if not self.slip.startswith("code"):
            return self.again(self.norm2(x)) if self.slip == "norm" else self.norm2(x)
        x = x if self.slip == "code rms" else x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.norm2.weight + self.norm2.bias

    def forward(self, x: Tensor) -> Tensor:
        taken = self.norm1(x)
        x = x + self.attn(taken, taken, taken, need_weights=False)[0]
        taken = self.normalised(x)
        gated = _GATES.get(self.slip, _GATES[""])(self.gate(taken), self.up(taken))
        made = self.down(gated)
        made = made + self.down.bias if self.slip == "bias" else made
        if self.slip in ("behind", "alone") and self.number == 1:
            return self.again(made) if self.slip == "alone" else x + self.again(made)
        return x + made + made if self.slip == "branch" else x + made


class Encoder(nn.Module):
    """Layers behind an embedding with positions."""

    def __init__(self, c: DrawnConfig, slip: str) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c, slip, number) for number in range(c.num_layers))
        self.final = nn.LayerNorm(c.d_model)
        self.slip = slip

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.embedding(tokens) + table
        for number, layer in enumerate(self.layers):
            x = layer(x + table if self.slip == "positions" and number else x)
        if self.slip.startswith("end"):
            x = x if self.slip == "end rms" else x - x.mean(-1, keepdim=True)
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.final.weight + self.final.bias
        out: Tensor = self.final(x)
        return out


def judged(slip: str, of: str) -> Result:
    facts = {"norm": "layer", "activation": "swiglu", "norm_placement": "pre", "positions": "learned"}
    subject = Subject(kind="encoder", name="e", build=partial(Encoder, slip=slip), declares=facts)
    (result,) = check(subject, only=[of], profile="quick").results
    return result


@pytest.mark.parametrize(
    ("slip", "of", "told"),
    [
        ("bias", "anatomy.residual", "the bias behind layers.0.down is added 2 times"),
        ("branch", "anatomy.residual", "what layers.0.down gives is not added to the stream as it is"),
        (
            "positions",
            "anatomy.residual",
            "what depends on the position alone is added to the stream behind layers.0.down",
        ),
        ("alone", "anatomy.residual", "what layers.1.down gives goes on without the stream"),
        ("norm", "anatomy.norm", "layers.0.again normalises what layers.0.norm2 has normalised already"),
        ("eps", "anatomy.norm", "the eps of layers.0.norm2 is not that of the same norm in other layers"),
        ("code rms", "anatomy.norm", "takes is not normalised by the declared norm"),
        ("end rms", "anatomy.norm", "what is given out is not normalised by the declared norm"),
        ("both halves", "anatomy.feed-forward", "silu on both halves of the gate, where swiglu is declared"),
        ("product", "anatomy.feed-forward", "silu on the product of the gate and what it gates, where swiglu is"),
        ("added", "anatomy.feed-forward", "silu added to the other half, which it is to multiply, where swiglu is"),
        ("sum", "anatomy.feed-forward", "the activation is silu, where swiglu is declared"),
        ("twice", "anatomy.feed-forward", "silu twice, where swiglu is declared"),
        ("factor", "anatomy.feed-forward", "silu times 1.1, where swiglu is declared"),
    ],
)
def test_a_slip_is_told(slip: str, of: str, told: str) -> None:
    result = judged(slip, of)
    assert result.outcome in ("FAIL", "OPEN"), (result.outcome, result.reason)
    assert told in result.reason


@pytest.mark.parametrize("of", ["anatomy.residual", "anatomy.norm", "anatomy.feed-forward"])
@pytest.mark.parametrize("slip", ["", "code", "end"])
def test_the_right_ones_pass(slip: str, of: str) -> None:
    assert judged(slip, of).outcome == "PASS"


def test_a_norm_of_one_layer_may_stand_behind_its_sublayer() -> None:
    assert judged("behind", "anatomy.residual").outcome == "PASS"


class Heads(nn.Module):
    """Self-attention whose heads are projected one by one, each with a bias of its own."""

    def __init__(self, c: DrawnConfig, scale: float) -> None:
        super().__init__()
        shape = (3, c.num_heads, c.d_model, c.d_head)
        self.weight = nn.Parameter(torch.randn(shape) * c.d_model**-0.5)
        self.bias = nn.Parameter(torch.randn(3, c.num_heads, 1, c.d_head))
        self.out = nn.Parameter(torch.randn(c.num_heads, c.d_head, c.d_model) * c.d_model**-0.5)
        self.scale = scale * c.d_head**-0.5

    def forward(self, x: Tensor) -> Tensor:
        both = zip(self.weight, self.bias, strict=True)
        q, k, v = (torch.einsum("btd,hde->bhte", x, weight) + bias for weight, bias in both)
        weights = torch.einsum("bhte,bhse->bhts", q * self.scale, k).softmax(-1)
        return torch.einsum("bhte,hed->btd", torch.einsum("bhts,bhse->bhte", weights, v), self.out)


class Stream(nn.Module):
    """An encoder of nothing but such heads."""

    def __init__(self, c: DrawnConfig, scale: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Heads(c, scale) for _ in range(c.num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(("scale", "outcome"), [(1.0, "PASS"), (1.1, "FAIL")])
def test_heads_that_are_projected_one_by_one_are_followed(scale: float, outcome: str) -> None:
    facts: dict[str, Any] = {"attention_scale": "1/sqrt(d_head)"}
    subject = Subject(kind="encoder", name="e", build=partial(Stream, scale=scale), declares=facts)
    (result,) = check(subject, only=["anatomy.scale"], profile="quick").results
    assert result.outcome == outcome, result.reason
