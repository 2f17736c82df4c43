"""What a subject's cache gives for a sequence in chunks: one tensor, or one a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.workbench import Workbench


def cached_outputs(bench: Workbench, model: Any, *given: Any, **named: Any) -> Tensor:
    """Return the outputs `[B, T, *]` of all chunks, one behind another, through the subject's cache.

    Args:
        bench: of the subject, whose `cache` is called.
        model: the model.
        given: a source, of an encoder-decoder, and the chunks.
        named: what else is given.

    Raises:
        SubjectError: it gave neither `[B, T, *]` of all chunks nor a list of the outputs `[B, t, *]` of each.
    """
    output = bench.call(bench.subject.cache, model, *given, **named)
    if _is_list_of_chunks(output, given[-1]):
        return torch.cat(list(output), dim=1)
    if not isinstance(output, Tensor):
        raise SubjectError(
            f"cache returned {type(output).__name__}; outputs [B, T, *] of all chunks, or a list of one [B, t, *] a "
            "chunk, are required"
        )
    return output


def _is_list_of_chunks(output: Any, chunks: Sequence[Tensor]) -> bool:
    """Whether it is a list of what each chunk gave, as long as that."""
    return (
        isinstance(output, (list, tuple))
        and len(output) == len(chunks)
        and all(isinstance(y, Tensor) and y.shape[:2] == x.shape[:2] for y, x in zip(output, chunks, strict=True))
    )
