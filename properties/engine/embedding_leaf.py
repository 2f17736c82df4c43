"""Gradients with respect to token embeddings, for models that take token ids.

This file imports torch alone: its source is pasted into standalone scripts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked


def at_embedding(model: nn.Module, tokens: Tensor, run: Callable[[], Tensor]) -> tuple[Tensor | None, Tensor]:
    """Run a model with the graph cut at the module that embeds `tokens`, perhaps with padding behind them.

    Args:
        model: holds an `nn.Embedding` that is called with the token ids.
        tokens: int64 `[B, T]`.
        run: calls the model.

    Returns:
        The embeddings `[B, T, D]` as a leaf that requires a gradient (None if no module embeds these tokens), and
        the output of `run`.
    """
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor | None:
        given = args[0] if args else None
        length = tokens.shape[1]
        if leaves or not isinstance(given, Tensor) or given.ndim != 2 or not torch.equal(given[:, :length], tokens):
            return None
        leaves.append(output[:, :length].detach().clone().requires_grad_())
        given_on = leaves[0].clone()  # the model may work in place on what it embedded, which a leaf forbids
        return given_on if given.shape == tokens.shape else torch.cat([given_on, output[:, length:]], dim=1)

    with hooked(part.register_forward_hook(cut) for part in model.modules() if isinstance(part, nn.Embedding)):
        output = run()
    return (leaves[0] if leaves else None), output
