"""The loss and the metric of a batch: a task's own, or cross-entropy and accuracy of logits and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from veriformer.ablations.tasks import IGNORED, Task


def logits_in(output: Any) -> Tensor:
    """Return the logits in what a model returned: a tensor, `.logits`, an entry "logits", or the first of a tuple.

    Raises:
        TypeError: there are none.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return output["logits"]
    if isinstance(output, tuple | list) and output:
        return logits_in(output[0])
    raise TypeError(
        f"the model returned {type(output).__name__}, in which no logits are found; return a tensor, or give the "
        "Task a loss and a metric"
    )


def parted(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Return the arguments, the keyword arguments and the labels in a batch.

    Raises:
        TypeError: it is neither (*inputs, labels) nor a dictionary with "labels".
    """
    if isinstance(batch, Mapping) and "labels" in batch:
        return (), {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return tuple(batch[:-1]), {}, batch[-1]
    raise TypeError(
        f"a batch is {_shown(batch)}; without a loss of the Task's it must be (*inputs, labels), or a dictionary with "
        '"labels"'
    )


def _judged(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits `[..., C]` and labels `[...]`.

    Raises:
        ValueError: they do not fit one another.
    """
    inputs, named, labels = parted(batch)
    logits = logits_in(model(*inputs, **named))
    if not isinstance(labels, Tensor) or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        kind = f"{tuple(labels.shape)} of {labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"the logits have the shape {tuple(logits.shape)} and the labels {kind}; cross-entropy needs integer "
            "labels and logits of their shape with the classes on a last axis: give the Task a loss and a metric else"
        )
    return logits.float(), labels.long()


def trained_on(model: nn.Module, batch: Any, task: Task, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch and its accuracy, which is nan where the loss is the task's own.

    Raises:
        TypeError: the loss is no scalar tensor.
    """
    if task.loss is not None:
        loss = task.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"the loss is {_shown(loss)}; a tensor with one number is required")
        return loss.reshape(()), torch.full((), float("nan"), device=loss.device)
    logits, labels = _judged(model, batch)
    loss = functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
    )
    judged = labels != IGNORED
    return loss, ((logits.detach().argmax(dim=-1) == labels) & judged).sum() / judged.sum()


def tested_on(model: nn.Module, batch: Any, task: Task) -> tuple[float, float, float, tuple[Tensor, Tensor] | None]:
    """Return loss, metric, their weight, and logits and labels of a classification, of one held-out batch.

    Raises:
        TypeError: the metric is no number.
    """
    if task.is_accuracy:
        logits, labels = _judged(model, batch)
        judged = labels != IGNORED
        logits, labels = logits[judged], labels[judged]
        right = (logits.argmax(dim=-1) == labels).float().mean()
        return float(functional.cross_entropy(logits, labels)), float(right), float(len(labels)), (logits, labels)
    loss = float(trained_on(model, batch, task, 0.0)[0])
    if task.metric is None:
        return loss, loss, samples_in(batch), None
    value = task.metric(model, batch)
    try:
        return loss, float(value), samples_in(batch), None
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric is {_shown(value)}; a number is required") from None


def samples_in(batch: Any) -> float:
    """Return how many samples a batch has: the length of its first tensor."""
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
    return float(len(leaves[0])) if leaves else 1.0


def first_of(batch: Any, most: int) -> Any:
    """Return the first samples of a batch of which every tensor has the samples first; else the batch as it is."""
    sizes = {x.shape[0] if x.ndim else 0 for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)}
    if len(sizes) != 1 or min(sizes) <= most or not isinstance(batch, tuple | list | dict | Tensor):
        return batch
    return pytree.tree_map(lambda x: x[:most] if isinstance(x, Tensor) else x, batch)


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; what moves itself (a tokenizer's) moves itself."""
    if isinstance(batch, tuple | list | dict | Tensor):
        return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__}"
