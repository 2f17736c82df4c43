"""What a subject gives for ordinary inputs of several lengths, with one sample and with two: what a change moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.causes.tracing.lines import tensors_of
from veriformer.properties.engine.stream import SEQUENCES
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary

_SAME = 1e-4
_LARGER = 1.5
_LENGTHS = (1, 2, 8, 16)
"""Beside the ordinary one: one position alone, and whole blocks of usual sizes."""

Size = tuple[int, int]


@dataclass(frozen=True)
class Given:
    """What a subject is and gives.

    Attributes:
        parameters: names and shapes.
        outputs: by the number of samples and of positions; None where it raises.
        sizes: entries of what each part returned in these calls, in their order.
    """

    parameters: list[tuple[str, Any]]
    outputs: dict[Size, list[Tensor] | None]
    sizes: list[int]

    def is_as_large(self, other: Given) -> bool:
        """Whether each part returns about as much as in another one: a convolution with another stride does not."""
        pairs = list(zip(self.sizes, other.sizes, strict=False))
        return all(one < _LARGER * two and two < _LARGER * one for one, two in pairs if one and two)

    def other_than(self, other: Given) -> set[Size]:
        """Return the sizes at which another one gives something else."""
        return {size for size, made in self.outputs.items() if not _same(made, other.outputs.get(size))}


def given_by(bench: Workbench) -> Given:
    """Return what a subject gives for ordinary inputs; nothing where its kind has none, or it cannot be built."""
    try:
        module = bench.pool.get(bench.configs[0], torch.float32).module
    except Exception:
        return Given([], {}, [])
    if not isinstance(module, torch.nn.Module):
        return Given([], dict(_outputs(bench)), [])
    sizes: list[int] = []
    with hooked(
        part.register_forward_hook(lambda part, args, made: sizes.extend(x.numel() for x in tensors_of(made)))
        for part in module.modules()
        if not isinstance(part, torch.jit.ScriptModule)
    ):
        outputs = dict(_outputs(bench))
    return Given([(name, p.shape) for name, p in module.named_parameters()], outputs, sizes)


def _outputs(bench: Workbench) -> Iterator[tuple[Size, list[Tensor] | None]]:
    if not has_ordinary_inputs(bench.subject.kind):
        return
    built = bench.pool.get(bench.configs[0], torch.float32)
    inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(1), torch.float32)
    length = inputs.tensors[0].shape[1] if inputs.tensors[0].ndim > 1 else 0
    is_sequence = bench.subject.kind in (*SEQUENCES, "norm", "feed_forward")
    for samples in (1, 2):
        for some in sorted({*_LENGTHS, length}) if is_sequence else (length,):
            cut = [x[:samples] if x.ndim > 1 else x for x in inputs.tensors]
            if some != length:
                cut[0] = torch.cat([cut[0]] * -(-some // length), dim=1)[:, :some]
            try:
                with torch.no_grad():
                    made = [x.clone() for x in tensors_of(bench.forward(built, *cut, *inputs.extras))]
            except Exception:
                yield (samples, some), None
            else:
                yield (samples, some), made


def _same(one: list[Tensor] | None, other: list[Tensor] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=_SAME, atol=_SAME, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )
