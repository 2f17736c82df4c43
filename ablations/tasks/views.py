"""Several small images of one object: the class is in all views together, in no particular order."""

from __future__ import annotations

import torch

from veriformer.ablations.tasks.task import Samples, Task, register

SIZE, CLASSES, VIEWS = 8, 4, 6
SEEN, NOISE = 0.35, 0.5


def _views(generator: torch.Generator, number: int, length: int) -> Samples:
    """Each class is a fixed pattern; a view shows it with probability `SEEN`, shifted, and noise alone else.

    Averaging mixes the views that show it with those that do not; attention may choose among them.
    """
    patterns = torch.randn(CLASSES, SIZE, SIZE, generator=torch.Generator().manual_seed(2)).sign()
    labels = torch.randint(CLASSES, (number,), generator=generator)
    seen = torch.rand(number, length, generator=generator) < SEEN
    seen[torch.arange(number), torch.randint(length, (number,), generator=generator)] = True  # one at least
    images = torch.randn(number, length, SIZE, SIZE, generator=generator)
    shift = torch.randint(SIZE, (number, length, 1), generator=generator)
    rows = (torch.arange(SIZE)[None, None] + shift) % SIZE
    shown = patterns[labels][:, None].expand(-1, length, -1, -1).gather(2, rows[..., None].expand(-1, -1, -1, SIZE))
    return Samples((NOISE * images + torch.where(seen[..., None, None], shown, 0.0),), labels)


register(
    Task(
        name="views", statement="which of four objects do six small images show, some of them noise alone?",
        architecture="classifier", vocab_size=1, length=VIEWS, chance=1 / CLASSES, num_classes=CLASSES, sample=_views,
        model="views",
    )
)  # fmt: skip
