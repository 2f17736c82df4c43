"""Declared facts that a model belies, one each, in a decoder of a style of its own: each is found, and the place named.

Heads are computed one after another by einsum, norms are written out, masks are filled with a large number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties import Subject, check

ACTIVATIONS = {
    "gelu": functional.gelu, "gelu_tanh": lambda u: functional.gelu(u, approximate="tanh"), "relu": functional.relu,
    "none": lambda u: u,
}  # fmt: skip


class Norm(nn.Module):
    """LayerNorm or RMSNorm, written out."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        middle = x - x.mean(-1, keepdim=True)
        return self.gain * middle * torch.rsqrt(middle.pow(2).mean(-1, keepdim=True) + 1e-6) + self.shift


class Block(nn.Module):
    """One layer; `how` says in what it departs from what it is called."""

    def __init__(self, c: Any, how: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.width, self.how = c.num_heads, c.d_model // c.num_heads, how
        self.norms = nn.ModuleList(Norm(c.d_model, how["norm"]) for _ in range(2))
        self.query, self.key, self.value, self.back = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
        self.wide, self.narrow = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def turned(self, x: Tensor) -> Tensor:
        count = self.how["turned"] or self.width
        omega = self.how["base"] ** (-torch.arange(0, count, 2, dtype=torch.float64) / count)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * omega
        unit = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_complex(x[..., :count].double().unflatten(-1, (-1, 2)).contiguous()) * unit
        return torch.cat([torch.view_as_real(pairs).flatten(-2).to(x.dtype), x[..., count:]], -1)

    def attended(self, x: Tensor, raw: Tensor) -> Tensor:
        how, length = self.how, x.shape[1]
        q, k, v = self.query(x), self.key(raw if how["raw_keys"] else x), self.value(raw if how["raw_values"] else x)
        at = torch.arange(length)
        apart = at[:, None] - at[None, :]
        hidden = (apart < 0) | (apart >= (how["window"] or length))
        made = []
        for head in range(self.heads):
            part = slice(head * self.width, (head + 1) * self.width)
            a, b = (self.turned(y[..., part]) if how["positions"] == "rotary" else y[..., part] for y in (q, k))
            scores = torch.einsum("bik,bjk->bij", a, b) * how["scale"](self.width)
            if head == 1:
                scores = scores * how["second_head"]
            if how["positions"] == "alibi":
                scores = scores - how["sign"] * how["slope"] ** (head + 1) * apart
            made.append(torch.einsum("bij,bjk->bik", scores.masked_fill(hidden, -1e9).softmax(-1), v[..., part]))
        return self.back(torch.cat(made, -1))

    def forward(self, x: Tensor) -> Tensor:
        how = self.how
        if how["placement"] == "post":
            x = self.norms[0](x + self.attended(x, x))
            return self.norms[1](x + self.narrow(ACTIVATIONS[how["activation"]](self.wide(x))))
        x = x + self.attended(self.norms[0](x), x)
        return how["skip"] * x + self.narrow(ACTIVATIONS[how["activation"]](self.wide(self.norms[1](x))))


class Model(nn.Module):
    """A decoder of such layers."""

    def __init__(self, c: Any, how: dict[str, Any]) -> None:
        super().__init__()
        self.how = how
        self.words, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len + 4, c.d_model)
        self.blocks = nn.ModuleList(Block(c, how) for _ in range(c.num_layers))
        self.last = Norm(c.d_model, how["norm"]) if how["closes"] else nn.Identity()
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * self.how["embedding"](self.words.weight.shape[1])
        at = torch.arange(tokens.shape[1])
        if self.how["positions"] == "learned":
            x = x + self.places(at + self.how["offset"])
        if self.how["positions"] == "sinusoidal":
            half = torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1]
            angle = at[:, None] * self.how["base"] ** -half
            x = x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(self.last(x))
        return made


USUAL: dict[str, Any] = {
    "norm": "layer", "placement": "pre", "positions": "none", "activation": "gelu", "window": None, "base": 1e4,
    "turned": None, "raw_keys": False, "raw_values": False, "scale": lambda width: width**-0.5, "second_head": 1.0,
    "sign": 1.0, "slope": 2.0**-4, "skip": 1.0, "closes": True, "embedding": lambda width: 1.0, "offset": 0,
}  # fmt: skip
ROOT = {"embedding": lambda width: width**0.5}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, str]] = {
    # name: what is declared, the true model, what is false in the other, the property, the place
    "alibi-sign": ({"positions": "alibi"}, {"positions": "alibi"}, {"sign": -1.0}, "positions", "blocks.0"),
    "alibi-slopes": ({"positions": "alibi"}, {"positions": "alibi"}, {"slope": 0.5}, "positions", "blocks.0"),
    "sinusoid-base": (
        {"positions": "sinusoidal", "base": 1e4}, {"positions": "sinusoidal"}, {"base": 500.0}, "positions", "",
    ),
    "sinusoid-declared-base": (
        {"positions": "sinusoidal", "base": 500.0}, {"positions": "sinusoidal", "base": 500.0}, {"base": 1e4},
        "positions", "",
    ),
    "rotary-base": (
        {"positions": "rotary", "base": 1e4}, {"positions": "rotary"}, {"base": 500.0}, "positions", "blocks.0",
    ),
    "rotary-dim": (
        {"positions": "rotary", "rotary_dim": 2}, {"positions": "rotary", "turned": 2}, {"turned": 4}, "positions",
        "blocks.0",
    ),
    "no-rotation": ({"positions": "rotary"}, {"positions": "rotary"}, {"positions": "none"}, "positions", "blocks.0"),
    "position-offset": (
        {"positions": "learned", "position_offset": 2}, {"positions": "learned", "offset": 2}, {"offset": 0},
        "positions", "places",
    ),
    "no-activation": ({"activation": "gelu"}, {}, {"activation": "none"}, "feed-forward", "blocks.0.narrow"),
    "relu": ({"activation": "gelu"}, {}, {"activation": "relu"}, "feed-forward", "blocks.0.narrow"),
    "tanh-form": ({"activation": "gelu"}, {}, {"activation": "gelu_tanh"}, "feed-forward", "blocks.0.narrow"),
    "final-norm": ({"norm": "layer", "final_norm": True}, {}, {"closes": False}, "norm", ""),
    "no-final-norm": ({"norm": "layer", "final_norm": False}, {"closes": False}, {"closes": True}, "norm", ""),
    "norm-kind": ({"norm": "layer"}, {}, {"norm": "rms"}, "norm", "blocks.0.norms.0"),
    "placement": ({"norm": "layer", "norm_placement": "pre"}, {}, {"placement": "post"}, "norm", "blocks.0"),
    "raw-keys": ({"norm": "layer", "norm_placement": "pre"}, {}, {"raw_keys": True}, "norm", "blocks.0"),
    "raw-values": ({"norm": "layer", "norm_placement": "pre"}, {}, {"raw_values": True}, "norm", "blocks.0"),
    "window": ({"causal": True, "window": 4}, {"window": 4}, {"window": 5}, "mask", "blocks.0"),
    "missing-scale": ({"attention_scale": "1/sqrt(d_head)"}, {}, {"scale": lambda width: 1.0}, "scale", "blocks."),
    "doubled-scale": ({"attention_scale": "1/sqrt(d_head)"}, {}, {"scale": lambda w: 1.0 / w}, "scale", "blocks."),
    "second-head": ({"attention_scale": "1/sqrt(d_head)"}, {}, {"second_head": 0.5}, "scale", "blocks."),
    "skip": ({"residual": True, "structure": "textbook"}, {}, {"skip": 2.0}, "residual", "blocks."),
    "embedding-scale": ({"embedding_scale": True}, ROOT, {"embedding": lambda width: 1.0}, "", ""),
}  # fmt: skip


def subject(how: dict[str, Any], facts: dict[str, Any]) -> Subject:
    return Subject(
        kind="decoder", build=lambda c: Model(c, {**USUAL, **how}), forward=lambda m, tokens: m(tokens),
        declares={"causal": True, **facts}, domain={"d_model": [8], "num_heads": [2], "num_layers": [2]},
    )  # fmt: skip


PLAIN = {
    "norm": "layer", "norm_placement": "pre", "activation": "gelu", "attention_scale": "1/sqrt(d_head)",
    "residual": True, "structure": "textbook",
}  # fmt: skip
TRUE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rotary": (
        {**PLAIN, "positions": "rotary", "base": 500.0, "rotary_dim": 2, "final_norm": True},
        {"positions": "rotary", "base": 500.0, "turned": 2},
    ),
    "alibi": ({**PLAIN, "positions": "alibi", "window": 4}, {"positions": "alibi", "window": 4}),
    "sinusoidal": ({**PLAIN, "positions": "sinusoidal", "embedding_scale": True}, {"positions": "sinusoidal", **ROOT}),
    "learned": (
        {**PLAIN, "positions": "learned", "position_offset": 2, "final_norm": False},
        {"positions": "learned", "offset": 2, "closes": False},
    ),
}


@pytest.mark.parametrize("name", TRUE)
def test_true_declarations_hold(name: str) -> None:
    facts, how = TRUE[name]
    held = {r.id: r for r in check(subject(how, facts), only=["anatomy"], profile="quick").results}
    assert {r.outcome for r in held.values()} <= {"PASS", "NOT_APPLICABLE"}, [(r.id, r.reason) for r in held.values()]
    assert sum(r.outcome == "PASS" for r in held.values()) >= 6


@pytest.mark.parametrize("name", CASES)
def test_a_false_declaration_fails_and_names_the_module(name: str) -> None:
    facts, true, false, family, place = CASES[name]
    only = [f"anatomy.{family}" if family else "anatomy"]
    results = check(subject({**true, **false}, facts), only=only, profile="quick").results
    failed = [r for r in results if r.outcome == "FAIL"]
    assert failed, [(r.id, r.outcome, r.reason) for r in results]
    assert place in " ".join(f"{r.reason} {r.counterexample.cause if r.counterexample else ''}" for r in failed)
