"""Right implementations that are unusual where they train: noise in train mode, losses that nothing is declared of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.subject import Subject
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.tests.mutants.renewed import JoinedOnce, joined
from veriformer.tests.traps import trap


class _Expert(nn.Module):
    """Two linear maps with ReLU and dropout between them."""

    def __init__(self, width: int, inner: int, rate: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, inner), nn.Linear(inner, width), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(functional.relu(self.up(x))))


@trap("style-noisy-router", "Noise chooses experts in train mode, which is no dropout", "Shazeer et al. 2017, 2.1")
def noisy_router() -> Subject:
    class Experts(nn.Module):
        def __init__(self, width: int, inner: int, rate: float) -> None:
            super().__init__()
            self.router = nn.Linear(width, 3, bias=False)
            self.experts = nn.ModuleList(_Expert(width, inner, rate) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.router(x)
            if self.training:
                scores = scores + torch.randn_like(scores)
            gates = scores.softmax(-1)
            return torch.stack([gates[..., i, None] * expert(x) for i, expert in enumerate(self.experts)]).sum(0)

    return Subject(
        kind="feed_forward",
        build=lambda c: Experts(c.d_model, c.d_ff, c.dropout),
        forward=lambda m, x: m(x),
    )


class _Loss(nn.Module):
    """A loss as a module, so that autocast has something to act on."""

    def __init__(self, smoothing: float, ignored: int | None) -> None:
        super().__init__()
        self.smoothing, self.ignored = smoothing, ignored

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        picked = -log_p.gather(-1, labels[..., None]).squeeze(-1)
        each = (1 - self.smoothing) * picked - self.smoothing * log_p.mean(-1)
        counted = torch.ones_like(labels, dtype=torch.bool) if self.ignored is None else labels != self.ignored
        return each.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def _loss(smoothing: float = 0.0, ignored: int | None = None, **facts: Any) -> Subject:
    return Subject(
        kind="loss",
        build=lambda c: _Loss(smoothing, ignored),
        forward=lambda m, logits, labels: m(logits, labels),
        declares=facts,
    )


@trap("style-loss-gathered", "A loss that gathers the label's logit knows no label that is not counted")
def gathered() -> Subject:
    return _loss()


@trap("style-loss-padding-id", "Label 0 is not counted, and -100 is no label", "annotated-transformer")
def padding_id() -> Subject:
    return _loss(ignored=0, ignore_index=0, empty_loss="zero")


@trap("style-loss-smoothed", "The target is smoothed, which nobody need say", "fairseq label_smoothed_cross_entropy")
def smoothed() -> Subject:
    return _loss(smoothing=0.1, label_smoothing=0.1)


@trap("style-low-rank", "A frozen matrix and a trained one of low rank beside it", "microsoft/LoRA")
def low_rank() -> Subject:
    class Adapted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, 2 * width, bias=False)
            self.up.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(functional.gelu(self.up(x) + self.b(self.a(x))))  # type: ignore[no-any-return]

    return Subject(
        kind="feed_forward", build=lambda c: Adapted(c.d_model), forward=lambda m, x: m(x),
        declares={"frozen": True, "activation": "other", "structure": "other"},
    )  # fmt: skip


@trap("style-master-weights", "All parameters are bfloat16; the optimiser keeps copies in float32", "NVIDIA/apex")
def master_weights() -> Subject:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float() if x.dtype != torch.float64 else x
            normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            return normed.to(x.dtype) * self.weight.to(x.dtype)

    return Subject(
        kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x),
        declares={"norm": "rms", "master_weights": True},
    )  # fmt: skip


class _Served(nn.Module):
    """A causal model whose forward runs in inference mode, as it is served."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.model = build(
            Config(vocab_size=c.vocab_size, d_model=c.d_model, num_heads=c.num_heads, d_ff=c.d_ff,
                   num_layers=c.num_layers, max_len=c.max_len, architecture="decoder", positions="sinusoidal")
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)


@trap("style-inference-only", "Its forward runs in inference mode, so that no parameter has a gradient", "llama")
def inference_only() -> Subject:
    return Subject(
        kind="decoder", build=_Served, forward=lambda m, tokens: m(tokens),
        declares={"inference_only": True, "positions": "sinusoidal", "tied": False},
    )  # fmt: skip


@trap(
    "style-skipped-layers",
    "In train mode whole layers are skipped, which scales nothing",
    "Fan et al. 2020 (LayerDrop)",
)
def skipped_layers() -> Subject:
    class Skipped(nn.Module):
        def __init__(self, width: int, heads: int, inner: int, rate: float) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(width, heads, inner, 0.0, batch_first=True)
            self.rate = rate

        def forward(self, x: Tensor) -> Tensor:
            if self.training and float(torch.rand(())) < self.rate:
                return x
            return self.layer(x)

    return Subject(
        kind="layer",
        build=lambda c: Skipped(c.d_model, c.num_heads, c.d_ff, c.dropout),
        forward=lambda m, x: m(x),
    )


@trap(
    "style-dropped-branches", "A layer drops its branches by itself, for the whole batch at once", "Huang et al. 2016"
)
def dropped_branches() -> Subject:
    class Layer(nn.Module):
        def __init__(self, width: int, heads: int, inner: int, rate: float) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
            self.network = _Expert(width, inner, 0.0)
            self.rate = rate

        def dropped(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            return x * 0 if float(torch.rand(())) < self.rate else x / (1 - self.rate)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x + self.dropped(self.attention(x, x, x, need_weights=False)[0]))
            return self.second(x + self.dropped(self.network(x)))

    return Subject(
        kind="layer",
        build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff, c.dropout),
        forward=lambda m, x: m(x),
    )


@trap("style-joined-matrices", "Matrices are joined for inference, and anew where the weights changed", "own")
def joined_by_version() -> Subject:
    return joined(JoinedOnce)


@trap("style-values-elsewhere", "Weights get their values from a checkpoint, torch.empty until then", "Llama 2 (Meta)")
def values_elsewhere() -> Subject:
    class Scaled(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(width))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return self.weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    return Subject(
        kind="norm",
        build=lambda c: Scaled(c.d_model),
        forward=lambda m, x: m(x),
        declares={"norm": "rms", "init": "other"},
    )
