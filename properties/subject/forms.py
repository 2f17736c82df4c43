"""The forms of input that a call walks, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

TWO_SEQUENCES = ("attention", "cross_attention", "encoder_decoder")


def forms_of(
    subject: Subject, args: tuple[Any, ...], given: Mapping[str, Any], config: DrawnConfig | None
) -> Iterable[str]:
    """Yield the forms of input of one call: edge sizes, masks, dropout that must be off.

    Args:
        subject: that is called.
        args: after the model.
        given: keywords.
        config: sizes of the model, if some were drawn.
    """
    tensors = [x for x in args if isinstance(x, Tensor) and x.ndim >= 2]
    time = -2 if subject.kind == "attention" else 1
    mask = given.get("attention_mask", given.get("memory_mask", given.get("source_mask")))
    if tensors and tensors[0].shape[0] == 1:
        yield "B=1"
    if tensors and tensors[0].shape[time] == 1:
        yield "T=1"
    if subject.kind in TWO_SEQUENCES and len(tensors) > 1 and tensors[0].shape[time] != tensors[1].shape[time]:
        yield "T_q != T_k"
    if isinstance(mask, Tensor) and mask.is_floating_point():
        yield "mask=additive"
    elif isinstance(mask, Tensor) and (subject.kind == "attention" or mask.ndim > 2):
        yield "mask=pairwise"
    if config is not None and config.dropout > 0 and subject.build is not None:
        yield "dropout > 0 in eval"
