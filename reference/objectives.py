"""What language models are trained on: next-token and masked-token losses, label smoothing, and the masking of BERT."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

IGNORE = -100
"""Label of a position at which nothing is to be predicted; the number that torch and Hugging Face use."""


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = IGNORE,
    num_items: int | None = None,
) -> Tensor:
    """Return the mean over counted positions of `-(1 - eps) log p(y) - eps / K sum_k log p(k)`.

    Args:
        logits: `[..., V]`; the loss is computed in float32 at least.
        labels: `[...]`, int64; positions with `ignore_index` count for nothing and get a gradient of exactly zero.
        label_smoothing: eps (Szegedy et al. 2016, section 7; 0.1 in Vaswani et al. 2017).
        ignore_index: label that is not counted.
        num_items: divide by this instead of the number of counted positions: that of all micro-batches together.

    Returns:
        A number `[]`; zero where nothing is counted.
    """
    counted = labels != ignore_index
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(wide, dim=-1)
    likelihood = log_p.gather(-1, labels.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)
    loss = -(1 - label_smoothing) * likelihood
    if label_smoothing:
        loss = loss - label_smoothing * log_p.mean(dim=-1)
    items = int(counted.sum()) if num_items is None else num_items
    return loss.masked_fill(~counted, 0).sum() / max(items, 1)


def shifted(labels: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Return labels `[B, T]` moved one to the left: position t is to predict token t + 1, the last one nothing."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)], dim=1)


def next_token_loss(logits: Tensor, tokens: Tensor, **options: float) -> Tensor:
    """Return the autoregressive loss of logits `[B, T, V]`: the labels are the tokens `[B, T]`, shifted here, once."""
    return cross_entropy(logits, shifted(tokens), **options)  # type: ignore[arg-type]


def accumulated_loss(micro_batches: Iterable[tuple[Tensor, Tensor]], **options: float) -> Tensor:
    """Return the loss of all micro-batches together, whatever their numbers of counted positions.

    Each sum is divided by the total count; a mean of means would weigh a token by the micro-batch it fell into.

    Args:
        micro_batches: pairs of logits `[b, T, V]` and labels `[b, T]`.
        options: as `cross_entropy`.
    """
    pairs = list(micro_batches)
    ignore = int(options.get("ignore_index", IGNORE))
    total = sum(int((labels != ignore).sum()) for _, labels in pairs)
    losses = [cross_entropy(x, y, **{**options, "num_items": total}) for x, y in pairs]  # type: ignore[arg-type]
    return torch.stack(losses).sum()


def mask_tokens(
    tokens: Tensor,
    generator: torch.Generator,
    *,
    mask_id: int,
    vocab_size: int,
    special_ids: Sequence[int] = (),
    probability: float = 0.15,
) -> tuple[Tensor, Tensor]:
    """Choose tokens to predict, and hide most of them (Devlin et al. 2019, section 3.1).

    Of the chosen ones 80 % become the mask token, 10 % a uniform random token, 10 % stay as they are.

    Args:
        tokens: `[B, T]`, int64.
        generator: of every choice.
        mask_id: id of the mask token.
        vocab_size: random tokens are drawn from `range(vocab_size)`.
        special_ids: never chosen.
        probability: of a token that is not special to be chosen.

    Returns:
        Inputs `[B, T]`, and labels `[B, T]`: the token where chosen, `IGNORE` elsewhere.
    """
    device = tokens.device
    draw = torch.rand(tokens.shape, generator=generator).to(device)
    chosen = (draw < probability) & ~torch.isin(tokens, torch.tensor(list(special_ids), device=device))
    fate = torch.rand(tokens.shape, generator=generator).to(device)
    words = torch.randint(vocab_size, tokens.shape, generator=generator).to(device)
    inputs = torch.where(chosen & (fate < 0.8), mask_id, tokens)
    inputs = torch.where(chosen & (fate >= 0.9), words, inputs)
    return inputs, torch.where(chosen, tokens, IGNORE)
