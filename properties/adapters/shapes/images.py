"""Models that take an image beside a text: they are given one image, always the same, and the text is judged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.understanding import B, T, basis, embeds, tokens_of, unknown
from veriformer.properties.adapters.unknown.wiring import Wiring, reached_by
from veriformer.properties.subject.sizes import DrawnConfig

IMAGES = r"(\w+_)?(images?|imgs?|pixel_values|pixels|pictures?|videos?|visual\w*)(_\w+)?"
"""Names of arguments that take images."""
TEXTS = r"(\w+_)?(captions?|text|tokens|ids|input_ids|words|questions?|x|prompts?)(_\w+)?"
"""Names of arguments that take tokens beside them."""


def text_with_image(
    sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument]
) -> tuple[Wiring, list[Argument], str] | None:
    """Return the call with a text alone, the arguments that are left, and what is to be said; None of other models.

    Args:
        sample: in eval mode.
        sizes: of it.
        arguments: of its forward.
    """
    if not embeds(sample):
        return None
    image = next((a for a in arguments if re.fullmatch(IMAGES, a.name.lower())), None)
    text = next((a for a in arguments if a is not image and re.fullmatch(TEXTS, a.name.lower())), None)
    if image is None or text is None or not (image.is_required or text is not arguments[0]):
        return None
    rest = [a for a in arguments if a is not image and a is not text]
    first = Argument(text.name, "first", is_required=True)
    given = basis([first, *rest], "x", sample)
    if unknown([first, *rest], given):
        return None
    named = {n: v for n, v in given.items() if not n.startswith("*")}
    x = tokens_of(sizes.vocab_size, B, T)
    for shape in image_shapes(sample):
        sizes_of_it = ", ".join(map(str, shape))
        source = (
            f"torch.linspace(-1, 1, {shape[0] * shape[1] * shape[2]}, device=x.device)"
            f".to(next(model.parameters()).dtype).view(1, {sizes_of_it}).expand(len(x), -1, -1, -1)"
        )
        wiring = Wiring(("x",), {image.name: source, text.name: "x", **named})
        try:
            wiring.call(sample, x)
        except Exception:
            continue
        shown = " x ".join(map(str, shape))
        return wiring, [first, *rest], f"{image.name} is given one image {shown}, always the same: the text is judged"
    return None


def with_its_own_token(sample: nn.Module, wiring: Wiring, x: Tensor, size: int) -> Wiring:
    """Return the call of a model that begins behind an image such that output t sees token t.

    Where output t is of the tokens before t alone, the first of them of the image, the outputs are those of one later.

    Args:
        sample: in eval mode.
        wiring: how it is called.
        x: tokens `[B, T]`.
        size: of the vocabulary.
    """
    reaches = [reached_by(lambda v: wiring.call(sample, v), x, (0, at), size) for at in (0, 2)]
    if any(r is None or r.ndim != 2 for r in reaches):
        return wiring
    is_strict = all(
        not bool(r[0, : at + 1].any()) and bool(r[0, at + 1 :].all())
        for r, at in zip(reaches, (0, 2), strict=True)
        if r is not None
    )
    if not is_strict:
        return wiring
    before = (
        *wiring.before,
        f"{wiring.inputs[0]} = torch.cat([{wiring.inputs[0]}, {wiring.inputs[0]}[:, -1:]], dim=1)",
    )
    return replace(wiring, before=before, pick=f"{wiring.pick}[:, 1:]")


def image_shapes(sample: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Yield the shapes `[C, H, W]` of images that a model may take."""
    channels = next((m.in_channels for m in sample.modules() if isinstance(m, nn.Conv2d)), 3)
    for side in (8, 16, 32, 28, 64, 224):
        yield channels, side, side
