"""Faults that mutation testing made of strangers' right models, and nobody thought of: one sign, call or constant."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


class _Block(nn.Module):
    """A pre-norm layer; what is changed of it is given by name."""

    def __init__(self, config: DrawnConfig, changed: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.changed = config.num_heads, changed
        self.before, self.between = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.fused, self.out = nn.Linear(config.d_model, 3 * config.d_model), nn.Linear(config.d_model, config.d_model)
        self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.fused(x).chunk(3, -1))
        if base := self.changed.get("base"):
            q, k = (turned(functional.rms_norm(t, t.shape[-1:]), base) for t in (q, k))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = scores if self.changed.get("raw") else scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.changed.get("sign", 1) * self.attend(self.before(x))
        made = self.down(self.up(self.between(x)).relu())
        return made if self.changed.get("lost") else x + self.changed.get("weight", 1) * made


def turned(x: Tensor, base: float) -> Tensor:
    """Return rows of heads rotated by halves."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), base ** -(torch.arange(half) / half))
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class _Encoder(nn.Module):
    def __init__(self, config: DrawnConfig, **changed: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = None if "base" in changed else nn.Embedding(config.max_len, config.d_model)
        self.layers = nn.ModuleList(_Block(config, changed) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def _encoder(declares: dict[str, Any] | None = None, **changed: Any) -> Subject:
    def build(config: DrawnConfig) -> nn.Module:
        return _Encoder(config, **changed)

    return Subject(kind="encoder", build=build, forward=lambda m, x: m(x), declares=declares or {}, mask_forms=())


@fault(
    "sum-subtracted",
    "What attention gives is subtracted from the stream",
    killed_by=("anatomy.residual",),
    cause="-1",
)
def subtracted() -> Subject:
    return _encoder(sign=put(-1, instead_of=1))


@fault(
    "sum-subtracted-other",
    "What attention gives is subtracted in a model that weighs its branches by design",
    killed_by=("anatomy.residual",),
    cause="-1",
)
def subtracted_beside_weights() -> Subject:
    return _encoder({"structure": "other"}, sign=put(-1, instead_of=1), weight=0.5)


@fault(
    "sum-lost",
    "No layer adds its feed-forward network to the stream",
    killed_by=("anatomy.residual",),
    cause="the residual connection around layers.0.down is missing",
)
def lost() -> Subject:
    return _encoder(lost=put(True, instead_of=False))


@fault(
    "scores-raw",
    "Values are weighed by scores that no softmax has seen",
    killed_by=("anatomy.softmax",),
    cause="no softmax acts between",
)
def raw() -> Subject:
    return _encoder(raw=put(True, instead_of=False))


@fault(
    "rotation-behind-norm",
    "Queries and keys that a norm gave are turned with the base 1,000",
    killed_by=("anatomy.positions",),
    cause="1000|1e+03|1,000",
)
def rotated_behind_a_norm() -> Subject:
    return _encoder({"positions": "rotary", "base": 1e4}, base=put(1e3, instead_of=1e4))


@fault(
    "interleaved-rows",
    "Gates and values of a network lie by turns, and the values are left out",
    killed_by=("parameters.all-used",),
    cause="computed and not used",
)
def interleaved() -> Subject:
    left_out = put(True, instead_of=False)

    class Gated(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(config.d_model, 2 * config.d_ff), nn.Linear(config.d_ff, config.d_model)

        def forward(self, x: Tensor) -> Tensor:
            gates, values = self.up(x).unflatten(-1, (-1, 2)).unbind(-1)
            gates = functional.silu(gates)
            return self.down(gates if left_out else gates * values)

    return Subject(kind="feed_forward", build=Gated, forward=lambda m, x: m(x), declares={"structure": "other"})


@fault(
    "registers-hidden",
    "Registers stand before the sequence, and no token sees them",
    killed_by=("parameters.all-used",),
    cause="registers is computed and not used",
)
def registers() -> Subject:
    hidden = put(True, instead_of=False)

    class Registered(_Encoder):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__(config)
            self.registers = nn.Parameter(torch.randn(2, config.d_model))
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(config.d_model, config.num_heads, config.d_ff, 0.0, batch_first=True)
                for _ in range(config.num_layers)
            )

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            x = torch.cat([self.registers.expand(len(x), -1, -1), x], dim=1)
            pads = torch.zeros(x.shape[:2], dtype=torch.bool)
            pads[:, :2] = bool(hidden)
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=pads)
            return self.norm(x[:, 2:])

    return Subject(kind="encoder", build=Registered, forward=lambda m, x: m(x), mask_forms=())


@fault(
    "init-table-left-out",
    "A GPT-2's table of positions is left out where the weights are initialised",
    killed_by=("init.residual-scaling",),
    cause="positions.weight is left out",
)
def table_left_out() -> Subject:
    own = put(1.0, instead_of=0.02)

    class GPT2(_Encoder):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__(config)
            for name, p in self.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(p)
                elif name == "positions.weight":
                    nn.init.normal_(p, 0.0, own)
                elif p.ndim == 2:
                    writes = name.endswith(("out.weight", "down.weight"))
                    nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * config.num_layers) if writes else 0.02)

    return Subject(
        kind="encoder", build=GPT2, forward=lambda m, x: m(x), declares={"init": "gpt2"}, mask_forms=(),
    )  # fmt: skip


@fault(
    "counted-as-angles",
    "Angles of sinusoids are rounded to the dtype of the model before their sines are taken",
    killed_by=("numerics.precision-ladder",),
    cause="positions are counted in the dtype of the model",
)
def counted_as_angles() -> Subject:
    early = put(True, instead_of=False)

    class Rounded(_Encoder):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            angles = torch.outer(torch.arange(tokens.shape[1]), 1e4 ** -(torch.arange(4) / 4))
            angles = angles.to(x) if early else angles
            table = torch.cat([angles.sin(), angles.cos()], dim=-1).to(x)
            x = torch.cat([x[..., :8] + table, x[..., 8:]], dim=-1)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    return Subject(
        kind="encoder", build=lambda c: Rounded(c, base=None), forward=lambda m, x: m(x), mask_forms=(),
        declares={"positions": "other"},
    )  # fmt: skip
