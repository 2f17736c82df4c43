"""Where the queries, keys and values of a head come from: the part of an earlier product that they are.

Rotations keep the norms of tokens: one factor explains the norms of all tokens in the right part, and in no other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from veriformer.properties.anatomy.traced import Traced, Value

LINEAR = ("mm", "bmm", "matmul", "addmm", "baddbmm", "add")
"""Operations that linear maps come down to, adding their biases among them."""


@dataclass
class Head:
    """Where a head's queries or keys come from.

    Attributes:
        source: `[B, T, K]`: the part of an earlier product that it is, but for a factor and a rotation.
        factor: by which it was multiplied since.
        when: number of that product among the values.
        place: the module that made it.
        start: first channel of the part.
        step: from one of its channels to the next.
    """

    source: Tensor
    factor: float
    when: int
    place: str
    start: int
    step: int

    @property
    def channels(self) -> range:
        """The channels of the product that it is."""
        return range(self.start, self.start + self.source.shape[-1] * self.step, self.step)


@dataclass
class Parts:
    """All parts of what a linear map gave that may be heads, side by side or every n-th channel.

    Attributes:
        tokens: `[B, T, W]`.
        step: between two channels of a head.
        sizes: `[N, B T]`: norms of the tokens of each part.
    """

    tokens: Tensor
    step: int
    sizes: Tensor

    def part(self, number: int, width: int) -> tuple[Tensor, int]:
        """Return the part `[B, T, K]` of a number, and its first channel."""
        block, first = divmod(number, self.step)
        start = block * width * self.step + first
        return self.tokens[..., start : start + width * self.step : self.step][..., :width], start


def same_tokens(one: Tensor, other: Tensor, batch: int, limit: float) -> bool:
    """Whether two tensors hold the same tokens in the same order, or samples and positions change places."""
    if one.numel() != other.numel() or one.shape[-1] != other.shape[-1] or one[..., 0].numel() % batch:
        return False
    length = one[..., 0].numel() // batch
    a, b = (x.cpu().double().reshape(batch * length, -1) for x in (one, other))
    size = limit * float(a.abs().amax())
    turned = b.unflatten(0, (length, batch)).transpose(0, 1).flatten(0, 1)
    back = b.unflatten(0, (batch, length)).transpose(0, 1).flatten(0, 1)
    return any(float((a - c).abs().amax()) <= size for c in (b, turned, back))


def source_of(seen: Traced, part: Tensor, before: int) -> Head | None:
    """Return the part of an earlier product that a head's queries or keys are, rotated and scaled or not.

    Args:
        seen: the trace of a forward.
        part: `[B, T, K]`.
        before: number of the value at which they were used.
    """
    _, length, width = part.shape
    norms = part.norm(dim=-1).flatten()
    if not float(norms.min()) > 0 or float(norms.std() / norms.mean()) < 1e-3:
        return None  # of one norm: normalised, or nothing to tell by
    for value in reversed(seen.values[:before]):
        if value.name not in LINEAR:
            continue
        for parts in _parts(seen, value, length, width):
            factors = (parts.sizes @ norms) / parts.sizes.square().sum(-1).clamp(min=1e-300)
            errors = (norms - factors[:, None] * parts.sizes).abs().amax(-1)
            best = int(errors.argmin())
            if float(errors[best]) <= seen.limit * float(norms.max()) and _is_of_map(seen, value, parts.tokens):
                source, start = parts.part(best, width)
                return Head(source, float(factors[best]), value.when, value.place, start, parts.step)
    return None


def _is_of_map(seen: Traced, value: Value, tokens: Tensor) -> bool:
    """Whether a value is what a linear map gave, or that and a bias: a rotation's two terms are added, too.

    Args:
        seen: the trace of a forward.
        value: one of its values.
        tokens: what it holds, `[B, T, W]`.
    """
    if value.name != "add":
        return True
    total = value.output.double().flatten(0, -2)
    size = seen.limit * float(total.abs().amax())
    for before in seen.values[max(0, value.when - 2) : value.when]:
        if before.name in LINEAR and before.output.numel() == value.output.numel():
            given = before.output.double()
            pairs = [(total, given.reshape(total.shape))]
            # heads that are projected one by one have biases of their own: the same for all tokens
            pairs += [(tokens.flatten(0, 1), x.flatten(0, 1)) for x in _as_tokens(given, *tokens.shape[:2])]
            for made, map_gave in pairs:
                rest = made - map_gave if made.shape == map_gave.shape else made
                if float((rest - rest[:1]).abs().amax()) <= size:
                    return True
    return False


def _parts(seen: Traced, value: Value, length: int, width: int) -> list[Parts]:
    known: list[Parts] = seen.once(
        ("parts", value.when, length, width), lambda: parts_of(value.output.double(), seen.batch, length, width)
    )
    return known


def parts_of(output: Tensor, batch: int, length: int, width: int) -> list[Parts]:
    """Return all parts of so many channels of the tokens of some tensor; none where it holds no such tokens."""
    channels, left = divmod(output.numel(), batch * length)
    if left or channels % width or channels < width:
        return []
    found = []
    count = channels // width
    for tokens in _as_tokens(output, batch, length):
        for step in (n for n in range(1, count + 1) if count % n == 0):
            sizes = tokens.unflatten(-1, (count // step, width, step)).norm(dim=-2)
            found.append(Parts(tokens, step, sizes.reshape(-1, count).T))
    return found


def _as_tokens(x: Tensor, batch: int, length: int) -> list[Tensor]:
    """Return `[B, T, W]` of what a linear map gave: samples first, or time first, or `[B, H, T, K]` head by head."""
    if x.ndim >= 3 and tuple(x.shape[:2]) == (length, batch):
        return [x.reshape(length, batch, -1).transpose(0, 1)]
    heads = [x.transpose(1, 2).reshape(batch, length, -1)] if x.ndim == 4 and x.shape[::2] == (batch, length) else []
    if x.ndim >= 3 and tuple(x.shape[:2]) == (batch, length):
        return [x.reshape(batch, length, -1), *heads]
    if heads:
        return heads
    if x.shape[-2] == batch * length or x.shape[0] == batch * length:
        flat = x.reshape(-1, batch * length, x.shape[-1]).transpose(0, 1).reshape(batch * length, -1)
        return [flat.unflatten(0, (batch, length)), flat.unflatten(0, (length, batch)).transpose(0, 1)]
    return []
