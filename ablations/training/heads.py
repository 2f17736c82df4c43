"""What each attention head is worth to a trained model: its output is taken out, and the loss is measured again."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.ablations.tasks import Samples
from veriformer.ablations.training.scores import logits_of, loss_and_accuracy
from veriformer.ablations.training.stacking import Stack

TRIED = 256
"""Samples on which a head is missed."""


@torch.no_grad()
def costs_of_heads(stack: Stack, samples: Samples) -> dict[str, list[list[list[float]]]]:
    """Return by how much loss (nats) rises and accuracy falls when one head is silent, by seed, layer and head.

    The columns of the output projection that read the head are set to zero and put back (Michel et al. 2019, section
    2).
    """
    tried = Samples(tuple(x[:, :TRIED] for x in samples.inputs), samples.labels[:, :TRIED])
    loss, accuracy = loss_and_accuracy(logits_of(stack, tried), tried.labels)
    losses: list[Tensor] = []
    accuracies: list[Tensor] = []
    for name, module in stack.shell.named_modules():
        if not hasattr(module, "num_heads"):
            continue
        weight = stack.parameters[f"{name}.o_proj.weight"]
        heads: int = module.num_heads
        width = weight.shape[-1] // heads
        silent = []
        for head in range(heads):
            columns = weight[..., head * width : (head + 1) * width]
            kept = columns.clone()
            columns.zero_()
            silent.append(loss_and_accuracy(logits_of(stack, tried), tried.labels))
            columns.copy_(kept)
        losses.append(torch.stack([found[0] - loss for found in silent], dim=1))
        accuracies.append(torch.stack([accuracy - found[1] for found in silent], dim=1))
    return {"loss": torch.stack(losses, dim=1).tolist(), "accuracy": torch.stack(accuracies, dim=1).tolist()}
