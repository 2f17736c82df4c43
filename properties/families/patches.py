"""Patches of an image: each becomes one token."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_part
from veriformer.properties.engine.property import holds

_MANY = 12
_MIXED = "channels and patches are mixed: the map [B, D, h, w] is cut into tokens before its channels are moved behind"

_TURNED = "the grid of positions is laid out column by column (meshgrid's indexing), the patches row by row"


@holds(
    "embedding.patches",
    statement="A token of an image is made of the pixels of one patch, each patch becomes one token, at its own place.",
    formula="d token_n / d pixel_p != 0 for the p of one rectangle R_n; the R_n that do not overlap cover the image; "
    "positions made of a row's and a column's are those of R_n",
    source="Dosovitskiy et al. 2021, section 3.1: x_p = E patch_p; where a map [B, D, h, w] is reshaped to [B, hw, D] "
    "without moving D behind, a token has a few channels of many patches.",
    kinds=("encoder", "classifier", "layer", "decoder", "encoder_decoder"),
    unless=needs_part("patches"),
    examples_factor=0.25,
)
def each_token_is_made_of_one_patch(case: Case) -> None:
    """The support of each token in the pixels is read off a gradient. Tokens without one (class tokens, registers) are
    left out. Where the tokens are affine in the image, each must be made of one rectangle, smaller than the image where
    there are several; overlapping patches are rectangles as well. Deep stems see what they see: there it is a question.
    What is added without any image shows the positions: where each of its channels follows one side of a grid that is
    read column by column, while the patches come row by row, tokens have the positions of others.
    """
    built = case.built()
    if case.subject.image is None:
        case.does_not_apply("the shape of its images is not known")
    tokens: Callable[[Tensor], Tensor] = lambda images: case.ask("patches", images, built=built)  # noqa: E731
    image, other = (_taken(tokens, case.normal(1, *case.subject.image, dtype=built.dtype)) for _ in range(2))
    supports = _supports(tokens, image)
    if len(supports) < 2:
        case.does_not_apply("fewer than two tokens are made of its images")
    with torch.no_grad():
        parts = [tokens(one)[0] for one in (image, other, (image + other) / 2)]
    is_affine = torch.allclose((parts[0] + parts[1]) / 2, parts[2], atol=1e-4)
    whole = image[0, 0].numel()
    for at, gradient in supports:
        case.require(
            case.apply(is_of_one_patch, gradient),
            f"token {at} is not made of one patch",
            got=f"{int((gradient != 0).any(0).sum())} of {whole} pixels, in a rectangle of {int(area_of(gradient))}",
            expected=f"one rectangle of about {whole // len(supports)} pixels",
            asks=None if is_affine else ("structure", "other"),
            cause=lambda seen=gradient: _odd(seen, whole // len(supports)) if is_affine else None,  # type: ignore[misc]
        )  # fmt: skip
    _patches_are_no_strips(case, supports[0][1], whole)
    _channels_are_together(case, [gradient for _, gradient in supports], len(parts[0]))
    covered = torch.stack([(gradient != 0).any(0) for _, gradient in supports]).any(0)
    if len(parts[0]) <= _MANY:  # else some of the tokens alone were looked at
        case.require(
            covered.all(), "pixels of the image reach no token", got=f"{int(covered.sum())} of {whole}", expected="all",
            asks=("structure", "other"), cause=lambda: _out_of_place([gradient for _, gradient in supports]),
        )  # fmt: skip
    if is_affine and len(parts[0]) <= _MANY:
        _positions_are_those_of_the_patches(case, tokens, image, supports)
    case.witness()


def _patches_are_no_strips(case: Case, gradient: Tensor, whole: int) -> None:
    """Ask, where a square image could be cut into as many squares, why a token has rows from side to side."""
    side, pixels = math.isqrt(whole), int((gradient != 0).any(0).sum())
    across, along = math.isqrt(whole // pixels), math.isqrt(pixels)
    is_square = tuple(gradient.shape[1:]) == (side, side)
    if not is_square or across < 2 or across * along != side or across**2 * pixels != whole:
        return
    case.require(
        ~case.apply(is_strip, gradient),
        f"a token is a strip of the image from side to side, where {across * across} squares of {along} x {along} "
        "pixels would cover it",
        got=f"{pixels} pixels from side to side",
        expected=f"{along} rows and {along} columns",
        asks=("structure", "other"),
        cause=lambda: strip_of(gradient, pixels),
    )


def _channels_are_together(case: Case, seen: list[Tensor], count: int) -> None:
    """Ask why a token takes a rectangle of one channel, where squares of all channels would give as many tokens."""
    channels, high, wide = seen[0].shape
    pixels = int((seen[0] != 0).sum())
    side = math.isqrt(pixels // channels)
    fits = channels * side * side == pixels and high % max(side, 1) == wide % max(side, 1) == 0
    if channels < 2 or not fits or (high // side) * (wide // side) not in (count, len(seen)):
        return
    alone = torch.stack([case.apply(channels_of, gradient) for gradient in seen])
    case.require(
        (alone > 1).any(),
        f"a token takes {pixels} pixels of one channel, where squares of {side} x {side} of all {channels} are as many",
        got="one channel a token",
        expected="all channels of one patch",
        asks=("structure", "other"),
        cause=lambda: (
            f"a token is made of {channels} patches of one channel, not of one patch of all {channels}: the axis of "
            "the channels is not moved behind the grid before the image is reshaped"
        ),
    )


def channels_of(gradient: Tensor) -> Tensor:
    """Return of how many channels a token takes pixels, of its gradient `[C, H, W]`."""
    return (gradient != 0).flatten(1).any(1).sum()


def is_strip(gradient: Tensor) -> Tensor:
    """Return whether a token depends on whole rows of the image, or on whole columns.

    Args:
        gradient: of the token in the pixels, `[C, H, W]`.
    """
    seen = (gradient != 0).any(0)
    return seen.any(0).all() | seen.any(1).all()


def _taken(tokens: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """Return an image in the dtype of the model, or in float32 where what makes the tokens is not part of it."""
    try:
        tokens(image)
    except SubjectError:
        return image.float()
    return image


def _positions_are_those_of_the_patches(
    case: Case, tokens: Callable[[Tensor], Tensor], image: Tensor, supports: list[tuple[int, Tensor]]
) -> None:
    """Compare the side of the grid that each channel of what is added goes by; of a square grid nothing is told."""
    with torch.no_grad():
        added = tokens(torch.zeros_like(image))[0, [at for at, _ in supports]]
    seen = torch.stack([gradient for _, gradient in supports])
    high, wide = sides_of(seen)
    case.require(
        ~case.apply(positions_are_turned, added, seen),
        f"tokens have the positions of other patches: the image has {high} rows of {wide} patches",
        got=f"channels that are alike in every {high}th token, and in {high} tokens in a row",
        expected=f"channels that are alike in every {wide}th token, and in {wide} tokens in a row",
        cause=lambda: _TURNED,
    )


def sides_of(seen: Tensor) -> tuple[int, int]:
    """Return the rows and columns of patches, from where in the image tokens begin to see pixels `[N, C, H, W]`."""
    pixels = (seen != 0).any(1)
    return len(pixels.any(2).float().argmax(1).unique()), len(pixels.any(1).float().argmax(1).unique())


def positions_are_turned(added: Tensor, seen: Tensor) -> Tensor:
    """Return whether what is added follows the sides of a grid, but not those where the tokens are.

    Args:
        added: `[N, D]`, what is added to each token.
        seen: `[N, C, H, W]`, gradients of each in the pixels.
    """
    (high, wide), order, pixels = sides_of(seen), torch.arange(len(seen)), (seen != 0).any(1)
    if min(high, wide) < 2 or high == wide or high * wide != len(seen):
        return torch.tensor(False)
    if follows_the_sides(added, pixels.any(2).float().argmax(1), pixels.any(1).float().argmax(1)):
        return torch.tensor(False)
    return torch.tensor(any(follows_the_sides(added, order % side, order // side) for side in (high, wide)))


def follows_the_sides(added: Tensor, rows: Tensor, columns: Tensor) -> bool:
    """Return whether each channel that is not the same everywhere is one number a row, or one number a column.

    Args:
        added: `[N, D]`, what is added to each token.
        rows: `[N]`, the row of each.
        columns: `[N]`, its column.
    """
    spread = added.amax(0) - added.amin(0)
    least = 1e-5 * float(added.abs().max())

    def constant(groups: Tensor) -> Tensor:
        within = [added[groups == g].amax(0) - added[groups == g].amin(0) for g in groups.unique()]
        return torch.stack(within).amax(0) <= least

    moving = spread > least
    return bool(moving.any()) and bool((constant(rows) | constant(columns))[moving].all())


def _supports(tokens: Callable[[Tensor], Tensor], image: Tensor) -> list[tuple[int, Tensor]]:
    """Return the gradient `[C, H, W]` of each token in the pixels, of some tokens where there are many."""
    given = image.clone().requires_grad_()
    output = tokens(given)
    if not isinstance(output, Tensor) or output.ndim != 3 or not output.requires_grad:
        raise SubjectError("patches did not return tokens [B, N, D] that depend on the image")
    weight = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(1)).to(output)
    count = output.shape[1]
    chosen = range(count) if count <= _MANY else (0, 1, 2, count // 2, count // 2 + 1, count - 2, count - 1)
    found = []
    for at in chosen:
        (gradient,) = torch.autograd.grad((output[0, at] * weight).sum(), given, retain_graph=True, allow_unused=True)
        if gradient is not None and bool(gradient.any()):
            found.append((at, gradient[0]))
    return found


def is_of_one_patch(gradient: Tensor) -> Tensor:
    """Return whether the pixels that a token depends on are one rectangle, smaller than the image, in every channel.

    A token may be made of some channels alone.

    Args:
        gradient: of the token in the pixels, `[C, H, W]`.
    """
    channels = gradient != 0
    seen = channels.any(0)
    alike = (channels[channels.flatten(1).any(1)] == seen).all()
    return (area_of(gradient) == seen.sum()) & (area_of(gradient) < seen.numel()) & alike


def area_of(gradient: Tensor) -> Tensor:
    """Return the area of the smallest rectangle around the pixels that a token depends on."""
    seen = (gradient != 0).any(0)
    rows, columns = seen.any(1).nonzero(), seen.any(0).nonzero()
    return (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)


def _odd(gradient: Tensor, pixels: int) -> str:
    return (
        _by_channel(gradient)
        or spread_of(gradient)
        or left_out_of(gradient, pixels)
        or exchanged_of(gradient)
        or strip_of(gradient, pixels)
        or _MIXED
    )


def spread_of(gradient: Tensor) -> str | None:
    """Say of which rows and columns a token's pixels are, where these are every second, third ... of the image."""
    seen = (gradient != 0).any(0)
    rows, columns = seen.any(1).nonzero().flatten(), seen.any(0).nonzero().flatten()
    steps = [int(side.diff().max()) if len(side) > 1 else 1 for side in (rows, columns)]
    even = all(len(side.diff().unique()) <= 1 for side in (rows, columns))
    if max(steps) == 1 or not even or int(seen.sum()) != len(rows) * len(columns):
        return None
    taken = [f"every {step}. {name}" if step > 1 else f"{name}s side by side"
             for step, name in zip(steps, ("row", "column"), strict=True)]  # fmt: skip
    return (
        f"a token takes {' and '.join(taken)} of the image, not a patch of them: the axes of the grid and those inside "
        "a patch are exchanged where the image is reshaped"
    )


def _out_of_place(seen: list[Tensor]) -> str | None:
    """Say which token is not made of the patch at its place, where patches come row by row, and what they lie apart."""
    rows, columns = seen[0].shape[1:]
    corners = [(places.amin(0).tolist(), places.amax(0).tolist()) for g in seen if len(places := g.any(0).nonzero())]
    (top, left), (bottom, right) = corners[0]
    high, wide = bottom - top + 1, right - left + 1
    across = columns // wide
    if len(corners) != len(seen) or rows % high or columns % wide or len(seen) != across * (rows // high):
        return None
    for token, ((y, x), _) in enumerate(corners):
        wanted = (token // across * high, token % across * wide)
        if (y, x) == wanted:
            continue
        step = y * columns + x
        because = ""
        if token == across and rows != columns and step == high * rows:
            because = (
                f": rows of patches lie {high} times the height apart, {high} * {rows} pixels, not times the width"
            )
        return f"token {token} begins at row {y} and column {x}, its patch at {wanted[0]} and {wanted[1]}{because}"
    return None


def _by_channel(gradient: Tensor) -> str | None:
    """Say that a token takes other pixels of one channel than of another."""
    counts = (gradient != 0).flatten(1).sum(1).tolist()
    if len(set(counts)) == 1 or not all(counts):
        return None
    told = ", ".join(map(str, counts))
    return (
        f"a token takes {told} pixels of the channels, other ones of each: axes of the grid, of a patch and of the "
        "channels are not in the order [rows of patches, columns of patches, channel, row, column] before the reshape"
    )


def exchanged_of(gradient: Tensor) -> str | None:
    """Say that a token takes a patch of the image read with as many columns as it has rows."""
    high, wide = gradient.shape[1:]
    turned = gradient.reshape(len(gradient), wide, high)
    if high == wide or not bool(is_of_one_patch(turned)) or bool((turned != 0).any(0).any(0).all()):
        return None  # a run of pixels fills whole rows of any width that divides it
    return (
        f"the image of {high} rows and {wide} columns is cut as if it had {wide} rows and {high} columns: height and "
        "width, or the rows and columns of the grid, are exchanged where it is reshaped"
    )


def strip_of(gradient: Tensor, pixels: int) -> str | None:
    """Say that a token takes as many pixels as a patch has, along rows of the image instead of a square of it."""
    seen = (gradient != 0).any(0)
    run = seen.flatten().nonzero().flatten()
    if int(seen.sum()) == pixels == int(run[-1] - run[0]) + 1 and int(area_of(gradient)) != pixels:
        return (
            f"a token takes {pixels} pixels that follow one another in reading order, not those of a patch: the rows "
            "inside a patch and the columns of patches are not exchanged before the reshape"
        )
    columns = seen.any(0)
    if int(seen.sum()) != pixels or not bool(columns.all()):
        return None
    rows = int(seen.any(1).sum())
    return (
        f"a token takes {pixels} pixels of {rows} row{'s' * (rows != 1)} of the image from side to side, not those of "
        "a patch: the rows inside a patch and the columns of patches are not exchanged before the reshape"
    )


def left_out_of(gradient: Tensor, pixels: int) -> str | None:
    """Say which pixels of its patch a token has nothing of, where the patch is a rectangle of the usual size.

    Args:
        gradient: of the token in the pixels, `[C, H, W]`.
        pixels: of a patch.
    """
    seen = (gradient != 0).any(0)
    rows, columns = seen.any(1).nonzero().flatten(), seen.any(0).nonzero().flatten()
    if int(area_of(gradient)) != pixels:
        return None
    patch = seen[int(rows.min()) : int(rows.max()) + 1, int(columns.min()) : int(columns.max()) + 1]
    missing = (~patch).nonzero().tolist()
    if not missing or 2 * len(missing) >= pixels:
        return None
    named = ", ".join(f"({row}, {column})" for row, column in missing[:4])
    return (
        f"of the {pixels} pixels of its patch a token has nothing of {len(missing)}, (row, column) {named}"
        f"{' ...' if len(missing) > 4 else ''}: a part of the patch is left out where it is put together, or another "
        "one is taken twice in its place"
    )
