"""Right models whose parts do not look like those of the textbook when they are taken apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap
from veriformer.tests.traps.architectures import Attention, PreNorm, decoder, encoder


def hidden(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return scores `[B, H, T, S]` under a mask of padding `[B, S]` and, where wanted, under the causal one."""
    allow = torch.ones(scores.shape[-2:], dtype=torch.bool)[None, None]
    allow = allow.tril() if causal else allow
    if mask is not None:
        allow = allow & mask[:, None, None, :]
    return scores.masked_fill(~allow, torch.finfo(scores.dtype).min)


@trap("anatomy-gain", "The gain of an RMSNorm is kept as its distance from 1", "architecture of Gemma")
def gain_from_one() -> Subject:
    class OneMoreRMSNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    class Block(PreNorm):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, Attention(c, causal=True))
            self.norm1, self.norm2 = OneMoreRMSNorm(c.d_model), OneMoreRMSNorm(c.d_model)  # type: ignore[assignment]

    def build(c: DrawnConfig) -> nn.Module:
        made = subject.build(c)  # type: ignore[misc]
        made.ln_f = OneMoreRMSNorm(c.d_model)
        return made  # type: ignore[no-any-return]

    subject = decoder(Block, padding_side="both")
    return Subject(
        kind="decoder", build=build, forward=subject.forward,
        declares={**subject.declares, "norm": "rms", "norm_placement": "pre", "final_norm": True, "activation": "gelu"},
    )  # fmt: skip


@trap("anatomy-norm-closes", "A norm closes each layer, and the next begins with its own", "architecture of Conformer")
def norm_that_closes() -> Subject:
    class Block(PreNorm):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c, Attention(c, causal=False))
            self.last = nn.LayerNorm(c.d_model)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.last(super().forward(x, mask))  # type: ignore[no-any-return]

    return encoder(Block, norm="layer", norm_placement="other", structure="other")


@trap("anatomy-head-loop", "Heads are computed one after another, all scores before all outputs", "course notes")
def loop_over_heads() -> Subject:
    class Loop(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (p(x).split(self.width, -1) for p in (self.q, self.k, self.v))
            scores = [a @ b.transpose(-2, -1) / self.width**0.5 for a, b in zip(q, k, strict=True)]
            weights = [hidden(s[:, None], mask, self.causal)[:, 0].softmax(-1) for s in scores]
            return self.o(torch.cat([w @ c for w, c in zip(weights, v, strict=True)], -1))

    return decoder(lambda c: PreNorm(c, Loop(c, causal=True)), padding_side="both", norm="layer", norm_placement="pre")


class _OneMatrix(Attention):
    """Queries, keys and values of one matrix, dealt in one of several layouts."""

    layout = "parts"

    def __init__(self, c: DrawnConfig, *, causal: bool) -> None:
        super().__init__(c, causal=causal)
        del self.q, self.k, self.v
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model)

    def deal(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = {"parts": (3, self.heads, self.width), "heads": (self.heads, 3, self.width)}
        if self.layout == "channels":  # every H-th channel belongs to a head
            q, k, v = self.qkv(x).unflatten(-1, (3, self.width, self.heads)).movedim(-3, 0).transpose(-1, -2)
        else:
            q, k, v = self.qkv(x).unflatten(-1, sizes[self.layout]).unbind(2 if self.layout == "parts" else 3)
        return tuple(t.transpose(1, 2) for t in (q, k, v))  # type: ignore[return-value]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.deal(x)
        weights = hidden(q @ k.transpose(-2, -1) * self.width**-0.5, mask, self.causal).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def _dealt(layout: str) -> Subject:
    def block(c: DrawnConfig) -> nn.Module:
        attention = _OneMatrix(c, causal=True)
        attention.layout = layout
        return PreNorm(c, attention)

    return decoder(block, padding_side="both")


@trap("anatomy-qkv-parts", "One matrix: all queries, then all keys, then all values", "architecture of GPT-2")
def one_matrix_by_part() -> Subject:
    return _dealt("parts")


@trap("anatomy-qkv-heads", "One matrix: query, key and value of a head side by side", "architecture of GPT-NeoX")
def one_matrix_by_head() -> Subject:
    return _dealt("heads")


@trap("anatomy-qkv-channels", "One matrix in which every H-th channel belongs to a head", "lucidrains/vit-pytorch")
def one_matrix_by_channel() -> Subject:
    return _dealt("channels")


@trap("anatomy-pre-scaled", "Queries and keys are both multiplied by d^-1/4", "openai/whisper")
def scaled_before() -> Subject:
    class Before(Attention):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return (q * self.width**-0.25) @ (k * self.width**-0.25).transpose(-2, -1)

    return encoder(lambda c: PreNorm(c, Before(c, causal=False)), attention_scale="1/sqrt(d_head)")


@trap("anatomy-baddbmm", "baddbmm adds the slopes 2^(-8i/h) and scales by its alpha", "architecture of BLOOM")
def baddbmm() -> Subject:
    class Added(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
            at = torch.arange(x.shape[1], dtype=torch.float64)  # whole numbers end at 256 in bfloat16
            slopes = torch.tensor([2 ** (-8 * (h + 1) / self.heads) for h in range(self.heads)], dtype=torch.float64)
            bias = (slopes.repeat(len(x))[:, None, None] * at).to(x.dtype)
            scores = torch.baddbmm(
                bias.expand(-1, len(at), -1), q.flatten(0, 1), k.flatten(0, 1).transpose(-2, -1),
                beta=1.0, alpha=self.width**-0.5,
            )  # fmt: skip
            weights = hidden(scores.unflatten(0, (len(x), -1)), mask, self.causal).softmax(-1)
            return self.o((weights @ v).transpose(1, 2).flatten(2))

    return decoder(
        lambda c: PreNorm(c, Added(c, causal=True)), positions="alibi", slopes="geometric", padding_side="both"
    )


class _Turning(Attention):
    """Rotary positions on the first channels, pairs half of them apart."""

    part = 1.0

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        width = int(self.width * self.part)
        rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.arange(q.shape[2])[:, None] * rates
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., :width].chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., width:]], -1)

        return turned(q), turned(k)


@trap("anatomy-partial-rotary", "A quarter of the channels is turned", "architecture of Pythia")
def partial_rotary() -> Subject:
    class Quarter(_Turning):
        part = 0.25

    subject = decoder(lambda c: PreNorm(c, Quarter(c, causal=True)), padding_side="both")
    return Subject(
        kind="decoder", build=subject.build, forward=subject.forward, domain={"d_model": [16], "num_heads": [2]},
        declares={**subject.declares, "positions": "rotary", "rotary_dim": 2, "layout": "halves"},
    )  # fmt: skip


@trap("anatomy-every-other", "Every other layer has no positions", "architecture of SmolLM3")
def every_other_layer() -> Subject:
    def block(c: DrawnConfig) -> nn.Module:
        turns = next(numbers) % 2 == 0
        return PreNorm(c, (_Turning if turns else Attention)(c, causal=True))

    numbers = iter(range(10**6))
    subject = decoder(block, positions="rotary", structure="other", padding_side="both")
    return Subject(
        kind="decoder", build=subject.build, forward=subject.forward, declares=subject.declares,
        domain={"num_layers": [2], "d_model": [16], "num_heads": [2]},
    )  # fmt: skip


@trap("anatomy-temperatures", "Each head has a learned temperature", "architecture of XCiT")
def learned_temperatures() -> Subject:
    class Tempered(Attention):
        def __init__(self, c: DrawnConfig, *, causal: bool) -> None:
            super().__init__(c, causal=causal)
            self.temperature = nn.Parameter(torch.ones(c.num_heads, 1, 1))

        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, k) * self.temperature

    return encoder(lambda c: PreNorm(c, Tempered(c, causal=False)))


@trap("anatomy-deepnorm", "The stream is multiplied before the branch is added", "Wang et al. 2022")
def deep_norm() -> Subject:
    class Deep(PreNorm):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.norm1(1.41 * x + self.attention(x, mask))
            return self.norm2(1.41 * x + self.network(x))

    facts: dict[str, Any] = {"structure": "other", "norm": "layer", "norm_placement": "post", "activation": "gelu"}
    return encoder(lambda c: Deep(c, Attention(c, causal=False)), **facts)


@trap("anatomy-keys-first", "Scores are laid out keys by queries, and normalised over their first axis")
def keys_first() -> Subject:
    class KeysFirst(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (-1, self.width)) for p in (self.q, self.k, self.v))
            scores = torch.einsum("bshk,bthk->bhst", k, q) / self.width**0.5
            weights = hidden(scores.mT, mask, self.causal).mT.softmax(-2)
            return self.o(torch.einsum("bhst,bshe->bthe", weights, v).flatten(2))

    return decoder(lambda c: PreNorm(c, KeysFirst(c, causal=True)), padding_side="both")


@trap("anatomy-local-layers", "A window in every other layer, the others see all", "architecture of GPT-Neo")
def local_layers() -> Subject:
    class Near(Attention):
        def allowed(self, length: int) -> Tensor:
            return super().allowed(length).triu(-2)

    def block(c: DrawnConfig) -> nn.Module:
        return PreNorm(c, (Near if next(numbers) % 2 else Attention)(c, causal=True))

    numbers = iter(range(10**6))
    subject = decoder(block, padding_side="both", positions="none")
    return Subject(
        kind="decoder", build=subject.build, forward=subject.forward, declares=subject.declares,
        domain={"num_layers": [2]},
    )  # fmt: skip


@trap("anatomy-normed-head", "The output has a linear map, an activation and a norm of its own", "architecture of BERT")
def normed_head() -> Subject:
    class Normed(nn.Module):
        def __init__(self, inner: nn.Module, c: DrawnConfig) -> None:
            super().__init__()
            self.inner, self.dense, self.norm = inner, nn.Linear(c.d_model, c.d_model), nn.LayerNorm(c.d_model)
            self.decoder = nn.Linear(c.d_model, c.vocab_size)

        def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.decoder(self.norm(functional.gelu(self.dense(self.inner(tokens, attention_mask)))))

    subject = encoder(lambda c: PreNorm(c, Attention(c, causal=False)))

    def build(c: DrawnConfig) -> nn.Module:
        inner = subject.build(c)  # type: ignore[misc]
        inner.head = nn.Identity()
        return Normed(inner, c)

    facts = {"norm": "layer", "norm_placement": "pre", "final_norm": True}
    return Subject(kind="encoder", build=build, forward=subject.forward, declares={**subject.declares, **facts})


@trap("anatomy-low-rank", "Keys and values are made of a latent of low rank, which is not normalised", "DeepSeek-V2")
def latent_keys() -> Subject:
    class Latent(Attention):
        def __init__(self, c: DrawnConfig, causal: bool) -> None:
            super().__init__(c, causal=causal)
            rank = max(2, c.d_model // 2)
            self.k = nn.Sequential(nn.Linear(c.d_model, rank, bias=False), nn.Linear(rank, c.d_model))
            self.v = nn.Sequential(nn.Linear(c.d_model, rank), nn.Linear(rank, c.d_model))

    return decoder(
        lambda c: PreNorm(c, Latent(c, causal=True)), padding_side="both", norm="layer", norm_placement="pre"
    )


@trap(
    "anatomy-fused-folded",
    "The scale is folded into the queries' columns of a fused map, and of its bias",
    "ONNX Runtime",
)
def scale_in_columns() -> Subject:
    class Fused(Attention):
        def __init__(self, c: DrawnConfig, causal: bool) -> None:
            super().__init__(c, causal=causal)
            self.packed, self.shift = (
                nn.Parameter(torch.randn(c.d_model, 3 * c.d_model)),
                nn.Parameter(torch.randn(3 * c.d_model)),
            )
            del self.q, self.k, self.v

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            width = x.shape[-1]
            columns = torch.ones(3 * width, dtype=x.dtype)
            columns[:width] = self.width**-0.5
            made = x @ (self.packed * columns) + self.shift * columns
            q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in made.split(width, -1))
            weights = hidden(q @ k.mT, mask, self.causal).softmax(-1)
            return self.o((weights @ v).transpose(1, 2).flatten(2))

    return decoder(lambda c: PreNorm(c, Fused(c, causal=True)), padding_side="both")
