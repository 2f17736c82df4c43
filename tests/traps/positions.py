"""Right positions that look wrong: other layouts, partial and complex rotations, offsets, shifted biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.position_bias import alibi_slopes
from veriformer.tests.mutants.parts import SelfAttention, model, positions
from veriformer.tests.traps import trap


@trap("T11", "sin/cos in halves instead of interleaved, undeclared", "tensorflow/tensor2tensor#177")
def halves() -> Subject:
    def table(length: int, width: int) -> Tensor:
        omega = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * omega
        return torch.cat([angles.sin(), angles.cos()], dim=-1).float()

    return positions(table)


@trap("PE-float32", "A table computed in float32, as most are")
def single_precision() -> Subject:
    def table(length: int, width: int) -> Tensor:
        omega = torch.exp(torch.arange(0, width, 2).float() * (-torch.log(torch.tensor(10000.0)) / width))
        angles = torch.arange(length).float()[:, None] * omega
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)

    return positions(table)


def _omega(width: int) -> Tensor:
    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _half_split(x: Tensor, p: Tensor) -> Tensor:
    angles = p.double()[:, None] * _omega(x.shape[-1])
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@trap("T12", "Half-split pairing, undeclared", "karpathy/nanochat#264")
def half_split() -> Subject:
    return Subject(kind="rotary", forward=lambda m, x, positions: _half_split(x, positions))


@trap("T12-complex", "Rotation as a complex product", "huggingface/transformers#39687")
def complex_form() -> Subject:
    def forward(m: Any, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions.double()[:, None] * _omega(x.shape[-1])
        turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    return Subject(kind="rotary", forward=forward)


@trap("T12-partial", "Half of the channels are rotated, the rest pass through", "huggingface/transformers#39687")
def partial() -> Subject:
    def forward(m: Any, x: Tensor, positions: Tensor) -> Tensor:
        return torch.cat([_half_split(x[..., :2], positions), x[..., 2:]], dim=-1)

    return Subject(kind="rotary", forward=forward, declares={"rotary_dim": 2})


@trap("T09", "ALiBi shifted by a constant a row", "vllm-project/vllm#945")
def shifted_alibi() -> Subject:
    def forward(m: Any, query_len: int, key_len: int) -> Tensor:
        keys = torch.arange(key_len, dtype=torch.float64)
        return torch.tensor(alibi_slopes(4))[:, None, None] * keys.expand(query_len, -1)[None]

    return Subject(kind="position_bias", forward=forward, declares={"positions": "alibi"})


@trap("T10", "Slopes of 12 heads are not monotone", "ofirpress/attention_with_linear_biases#17")
def twelve_heads() -> Subject:
    def forward(m: Any, query_len: int, key_len: int) -> Tensor:
        distance = (torch.arange(query_len)[:, None] - torch.arange(key_len)).abs()
        return -torch.tensor(alibi_slopes(12))[:, None, None] * distance

    return Subject(kind="position_bias", forward=forward, declares={"positions": "alibi"})


@trap("alibi-geometric", "Slopes of 12 heads are 2^(-8i/12)", "Press et al. 2022, section 3")
def twelve_heads_by_the_text() -> Subject:
    def forward(m: Any, query_len: int, key_len: int) -> Tensor:
        distance = (torch.arange(query_len)[:, None] - torch.arange(key_len)).abs()
        return -(2.0 ** (-8 * torch.arange(1, 13) / 12))[:, None, None] * distance

    return Subject(kind="position_bias", forward=forward, declares={"positions": "alibi", "slopes": "geometric"})


@trap("T32", "Learned positions start at row 2", "huggingface/transformers#15292")
def offset_rows() -> Subject:
    return Subject(
        kind="positions",
        build=lambda c: nn.Embedding(c.max_len + 2, c.d_model),
        forward=lambda m, length: m(torch.arange(length) + 2),
        declares={"positions": "learned", "position_offset": 2},
    )


@trap("T15", "A causal model without positions", "verified numerically")
def no_positions() -> Subject:
    return model(lambda m: None, architecture="decoder", positions="none")


@trap("T35", "The factor sqrt(d) stands elsewhere", "SamLynnEvans/Transformer#10")
def scale_elsewhere() -> Subject:
    return model(lambda m: None, {"padding_side": "both"}, architecture="decoder", embedding_scale=False)


@trap("T13", "Values are rotated and outputs rotated back", "labmlai/annotated_deep_learning_paper_implementations#251")
def rotated_back() -> Subject:
    class Turned(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            index = torch.arange(x.shape[1])
            q, k, v = (_half_split(self.split(p(x)), index) for p in (self.q, self.k, self.v))
            scores = q @ k.transpose(-2, -1) * self.width**-0.5
            return x + self.o(self.merge(_half_split(self.weights(scores, attention_mask) @ v, -index)))

    return Subject(
        kind="layer",
        build=Turned,
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "rotary", "padding_side": "both"},
    )


@trap(
    "T14", "Dynamic NTK scaling beyond max_len: prefixes depend on the length there", "huggingface/transformers#25104"
)
def dynamic_scaling() -> Subject:
    class Dynamic(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            length = x.shape[1]
            stretch = max(1.0, length / 12)
            q, k = (_half_split(self.split(p(x)), torch.arange(length) / stretch) for p in (self.q, self.k))
            allowed = torch.ones(length, length, dtype=torch.bool).tril()
            scores = (q @ k.transpose(-2, -1) * self.width**-0.5).masked_fill(~allowed, -torch.inf)
            return x + self.o(self.merge(self.weights(scores, attention_mask) @ self.split(self.v(x))))

    return Subject(
        kind="layer",
        build=Dynamic,
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": True, "positions": "rotary", "max_len": 12},
    )


@trap("rotary-part-of-four", "Four channels of a head are turned; narrower heads are refused", "GPT-NeoX, GPT-J")
def four_channels() -> Subject:
    class Partial(nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            if x.shape[-1] < 4:
                raise ValueError("a head has fewer channels than are rotated")
            angles = torch.outer(positions.double(), 1e4 ** -(torch.arange(0, 4, 2, dtype=torch.float64) / 4))
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            one, other, rest = x[..., :2], x[..., 2:4], x[..., 4:]
            return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], dim=-1)

    return Subject(
        kind="rotary", build=lambda c: Partial(), forward=lambda m, x, positions: m(x, positions),
        declares={"rotary_dim": 4, "layout": "halves", "base": 1e4},
    )  # fmt: skip


@trap("alibi-whole-sequences", "A bias is made for as many queries as keys, and others are refused", "llama.cpp")
def whole_sequences() -> Subject:
    class Bias(nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)))

        def forward(self, queries: int, keys: int) -> Tensor:
            assert queries == keys, "the table is square"
            at = torch.arange(keys)
            return -self.slopes[:, None, None] * (at[:, None] - at).abs()  # type: ignore[no-any-return,operator,index]

    return Subject(kind="position_bias", build=lambda c: Bias(c.num_heads), declares={"positions": "alibi"})
