"""Cross-entropy over tiles of the vocabulary (no full softmax is made), with smoothing and PaLM's z-loss."""

import torch

from veriformer.properties import Subject

TILE, IGNORE, SMOOTHING, Z = 4, -100, 0.1, 1e-2


def tiled_cross_entropy(logits, labels):
    flat, labels = logits.flatten(0, -2), labels.flatten()
    counted = labels != IGNORE
    target = labels.masked_fill(~counted, 0)
    best = flat.new_full((flat.size(0),), -torch.inf)
    total, plain, picked = (flat.new_zeros(flat.size(0)) for _ in range(3))
    for start in range(0, flat.size(1), TILE):
        tile = flat[:, start : start + TILE]
        new = torch.maximum(best, tile.detach().amax(1))
        total = total * (best - new).exp() + (tile - new[:, None]).exp().sum(1)
        best = new
        plain = plain + tile.sum(1)
        here = (target >= start) & (target < start + tile.size(1))
        at = (target - start).clamp(0, tile.size(1) - 1)
        picked = picked + torch.where(here, tile.gather(1, at[:, None]).squeeze(1), torch.zeros_like(picked))
    lse = best + total.log()
    loss = lse - (1 - SMOOTHING) * picked - SMOOTHING * plain / flat.size(1)
    loss = loss + Z * lse.square()
    return loss.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    forward=lambda model, logits, labels: tiled_cross_entropy(logits, labels),
    declares={"ignore_index": -100, "label_smoothing": SMOOTHING, "z_loss": Z, "empty_loss": "zero"},
)
