"""Faults of sums and of what they are cut into: partial sums, shares of a smoothing, strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


@fault(
    "FF-partial-sums",
    "GELU stands inside the loop over input channels, and is applied to every partial sum",
    killed_by=("ffn.definition",),
    cause="inside the loop that adds them up",
)
def activation_of_partial_sums() -> Subject:
    inside = put(F.gelu, instead_of=lambda x: x)
    behind = put(lambda x: x, instead_of=F.gelu)

    class Network(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

        def forward(self, x: Tensor) -> Tensor:
            total = self.up.bias.expand(*x.shape[:-1], -1)
            for k in range(0, x.shape[-1], 4):
                total = inside(total + x[..., k : k + 4] @ self.up.weight[:, k : k + 4].T)
            return self.down(behind(total))

    return Subject(
        kind="feed_forward", build=Network, forward=lambda m, x: m(x), declares={"activation": "gelu", "bias": True}
    )


@fault(
    "LS-backward-share",
    "A backward of smoothed labels takes the smoothing off the label, and gives no entry its share",
    killed_by=("gradients.gradcheck",),
    cause="the smoothing's share of every entry",
)
def smoothing_without_its_share() -> Subject:
    share = put(lambda eps, width: 0.0, instead_of=lambda eps, width: eps / width)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, labels: Tensor, eps: float) -> Tensor:
            flat, wanted = logits.flatten(0, -2), labels.flatten()
            ctx.save_for_backward(flat.softmax(-1), wanted)
            ctx.eps, ctx.shape = eps, logits.shape
            return F.cross_entropy(flat, wanted, label_smoothing=eps)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Any:
            p, labels = ctx.saved_tensors
            counted = labels >= 0
            hot = F.one_hot(labels.clamp(min=0), p.shape[-1]).to(p.dtype)
            off = (p - (1 - ctx.eps) * hot - share(ctx.eps, p.shape[-1])) * counted[:, None] / counted.sum()
            return (gradient * off).view(ctx.shape), None, None

    return Subject(
        kind="loss", forward=lambda m, logits, labels: Loss.apply(logits, labels, 0.1),
        declares={"label_smoothing": 0.1, "once_differentiable": True, "empty_loss": "nan"},
    )  # fmt: skip


@fault(
    "EM-patch-stride",
    "Rows of patches are taken as far apart as the image is high, not as it is wide",
    killed_by=("embedding.patches",),
    cause="times the height",
)
def strides_by_the_height() -> Subject:
    side = put(lambda high, wide: high, instead_of=lambda high, wide: wide)

    class Embedding(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.project = nn.Linear(48, c.d_model)
            self.layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True)

        def patches(self, images: Tensor) -> Tensor:
            b, c, high, wide = images.shape
            size = (b, high // 4, wide // 4, c, 4, 4)
            stride = (c * high * wide, 4 * side(high, wide), 4, high * wide, wide, 1)
            return self.project(images.contiguous().as_strided(size, stride).reshape(b, -1, 16 * c))

    return Subject(
        kind="layer", build=Embedding, forward=lambda m, x: m.layer(x), patches=lambda m, images: m.patches(images),
        image=(3, 8, 12), declares={"positions": "none"},
    )  # fmt: skip
