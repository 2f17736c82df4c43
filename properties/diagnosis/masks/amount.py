"""Why the amount of padding matters where its content does not: what it is that the number of positions goes into."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.measured import tolerance_of
from veriformer.properties.causes.replacing import Replaced, Run, Within, line_that_parts
from veriformer.properties.causes.tracing.lines import apart, text_of, told
from veriformer.properties.causes.tracing.localize import where_it_enters
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.attentions import attentions, rows_of
from veriformer.properties.diagnosis.masks.convolved import convolved_padding
from veriformer.properties.diagnosis.masks.masked import Masked
from veriformer.properties.diagnosis.masks.pooled import pooling_of

PROVEN = "with what this line gives without padding the outputs are right"
"""How a cause ends whose line was proven to be the one: nothing but what it gives is changed, and all is right."""
_LEAST = 1e-9  # a weight below is that of a hidden key
_NUMBER = 1e-4
_TABLES = ("embedding", "__getitem__", "index_select", "narrow", "gather", "take_along_dim")
_OTHER = 5
_DRAWS = 4  # of tokens: some rules go by which they are


class _Amount:
    """One sample alone, and the same behind or before padding.

    Attributes:
        masked: the subject.
        side: on which the padding stands.
        x: the sample with its padding.
        within: where the sample stands in it.
    """

    def __init__(self, masked: Masked, side: str) -> None:
        self.masked, self.side = masked, side
        config = masked.built.config
        longest = int(min(masked.case.subject.fact("max_len", 64), config.max_len))
        taken = 7  # as long as the other of two sequences is
        real = next(n for n in (apart(n, config) for n in (5, 9)) if n != taken)
        long = next(n for n in (apart(n, config) for n in (real + 4, 9, 13)) if n not in (taken, real))
        if long > longest:
            real, long = masked.real, masked.length
        self._set(real, long)

    def _set(self, real: int, long: int) -> None:
        self.within = Within(real, long, 0 if self.side == "right" else long - real)
        self.x = self.masked.draw(1, long)
        self.mask = self.masked.padded(self.x, [real], self.side)

    def alone(self) -> Run:
        """Return a run of the sample without padding, on a new model."""
        x = self.x[:, self.within.start : self.within.start + self.within.short]
        ones, built = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device), self.masked.clean()
        return lambda: self.masked(x, ones, built)

    def among(self) -> Run:
        """Return a run of the sample with padding, on a new model."""
        built = self.masked.clean()
        return lambda: self.masked(self.x, self.mask, built)

    def cut(self, output: Tensor) -> Tensor:
        output, start, short = output.detach(), self.within.start, self.within.short
        return output[:, start : start + short] if self.masked.per_position and output.shape[1] != short else output

    def limit(self) -> float:
        """Return how far apart is rounding; angles at other positions are made in float32."""
        own = 4 * tolerance_of(self.masked.case.bench, self.masked.built)
        return max(own, 1e-4) if self.side == "left" else own

    def agrees(self, among: Tensor, alone: Tensor) -> bool:
        got, alone = self.cut(among), alone.detach()
        return got.shape == alone.shape and float((got - alone).abs().max()) <= self.limit() * size_of(alone)


def amount_cause(masked: Masked, side: str) -> str | None:
    """Say what the amount of padding enters through; silent where that is not the amount alone.

    Args:
        masked: the subject.
        side: on which the amount of padding matters.
    """
    for _ in range(_DRAWS):
        amount = _Amount(masked, side)
        if not amount.agrees(amount.among()(), amount.alone()()):
            break
    else:
        return _of_equal_length(masked, side)
    if weighed := _weighed(amount) or _convolved(amount):
        return weighed
    found = line_that_parts(amount.alone, amount.among, amount.within, amount.agrees, amount.limit() / 4)
    if found and text_of(found.long.file, found.long.number).startswith("return "):
        found = None  # of what is returned it is no news that the outputs are right with it
    return _said(amount, found) if found else _scaled(amount) or _in_parts(amount) or _behind(amount)


def _weighed(amount: _Amount) -> str | None:
    """Tell whether real queries give padded keys a weight, whatever stands there."""
    masked, within = amount.masked, amount.within
    seen = masked.attended(amount.x, amount.mask)
    real = amount.mask[0].cpu()
    leaking = []
    for number, a in enumerate(seen):
        queries = real if a.weights.shape[-2] == within.long else torch.ones(a.weights.shape[-2], dtype=torch.bool)
        share = a.weights.cpu()[..., queries, :][..., ~real].sum(-1)
        if float(share.max()) > _LEAST:
            leaking.append((number, a, float(share.mean())))
    if not leaking:
        return None
    number, a, weight = leaking[0]
    if a.key.shape[-2] != len(real):
        return None
    hidden = a.key.cpu()[..., ~real, :]
    same = float((hidden - hidden[..., :1, :]).abs().max()) <= 1e-9 * float(a.key.abs().max())
    crossing = masked.case.subject.kind == "encoder_decoder" and a.weights.shape[-2] != within.long
    where = "the decoder's cross-attention" if crossing else f"attention {number + 1} of {len(seen)}"
    text = f"{where} gives the {len(real) - within.short} padded keys {weight:.2g} of the weight of a real query"
    if same:
        return text + (
            ", each of them the same key whatever stands there: padding is set to a constant (zero) on the way, and no "
            "mask hides what comes of it here, so that each takes its share (a mask read off rows of zeros finds none "
            "behind a layer, which makes other numbers of them)"
        )
    return f"{text}, though their content does not matter"


def _scaled(amount: _Amount) -> str | None:
    """Tell whether what is pooled is what it is alone, times one factor."""
    if amount.masked.case.subject.kind != "classifier":
        return None
    ones = torch.ones(1, amount.within.short, dtype=torch.bool, device=amount.x.device)
    start = amount.within.start
    alone = pooling_of(amount.masked, amount.x[:, start : start + amount.within.short], ones)
    among = pooling_of(amount.masked, amount.x, amount.mask)
    if alone is None or among is None or (factor := _factor(alone[1], among[1])) is None or abs(factor - 1) < _NUMBER:
        return None
    many = amount.within.long - amount.within.short
    return (
        f"with {amount.within.short} real positions and {many} padded ones the pooled vector is that without padding "
        f"times {factor:.4g}{_ratio(amount, factor)}"
    )


def _in_parts(amount: _Amount) -> str | None:
    """Tell whether the last positions part wherever a length is no multiple of a number: an incomplete last part."""
    masked = amount.masked
    config = masked.built.config
    longest = int(min(masked.case.subject.fact("max_len", 64), config.max_len, 16))
    if amount.side != "right" or not masked.per_position or longest < 9:
        return None
    x, parted = masked.draw(1, longest), {}
    for length in range(1, longest - 3):
        ones = torch.ones(1, length, dtype=torch.bool, device=x.device)
        moved = masked.moved(masked(x, masked.padded(x, [length], "right"))[:, :length], masked(x[:, :length], ones))
        if bool(moved.any()):
            parted[length] = moved[0].nonzero().flatten().tolist()
    for size in range(2, longest // 2):
        for above in (0, size):
            if list(parted) == [n for n in range(above + 1, longest - 3) if n % size]:
                length = next(iter(parted))
                last = list(range(length - length % size, length))
                if parted[length] != last:
                    return None
                which = "all lengths" if not above else f"lengths above {above}"
                at = f"positions {_span(last)}" if len(last) > 1 else f"position {last[0]}"
                return (
                    f"a sample alone and the same before padding differ at {which} that are no multiple of {size}, "
                    f"with {length} at {at}: the positions of an incomplete last part of {size} are treated otherwise"
                )
    return None


def _convolved(amount: _Amount) -> str | None:
    if amount.side != "right":
        return None
    built, masked, within = amount.masked.clean(), amount.masked, amount.within
    x = amount.x[:, : within.short]
    ones = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return convolved_padding(
        built.module, lambda: masked(x, ones, built), lambda: masked(amount.x, amount.mask, built), amount.limit()
    )


def _behind(amount: _Amount) -> str | None:
    """Name the module behind which the padded run parts, where no line alone makes the difference."""
    built, masked, within = amount.masked.clean(), amount.masked, amount.within
    x = amount.x[:, within.start : within.start + within.short]
    ones = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    place = where_it_enters(
        built.module,
        lambda: masked(x, ones, built),
        lambda: masked(amount.x, amount.mask, built),
        within.cut,
        amount.limit() / 4,
        every_input=True,
    )
    if place is None:
        return None
    many = within.long - within.short
    return (
        f"with {within.short} real positions and {many} padded ones the real ones come out other than without {place}"
    )


def _said(amount: _Amount, found: Replaced) -> str:
    short, long = found.short.outputs[0], found.long.outputs[0]
    cut = long if long.shape == short.shape else amount.within.cut(long)
    many = amount.within.long - amount.within.short
    whose = " of the source" if amount.masked.which == "source" and amount.masked.stream.kept is not None else ""
    where = told(found.long)
    behind = f"with {amount.within.short} real positions{whose} and {many} padded ones"
    what = _what(amount, found, short.cpu(), cut.cpu())
    return f"{behind} {what} at {where}; {PROVEN}"


def _what(amount: _Amount, found: Replaced, short: Tensor, long: Tensor) -> str:
    """Say in what two results of one line differ."""
    within = amount.within
    if short.dtype == torch.bool:
        return "a mask is another one for the real positions than without padding"
    if short.numel() == 1:
        return _one_number(amount, found.long.name, float(short), float(long))
    one, two = _counted(short), _counted(long)
    if one and two:
        end = f"{_span(two)} instead of {_span(one)}"
        by = two[0] - one[0]
        if len(one) != within.short and two[0] == within.long and one[0] == within.short:
            return (
                f"positions of the other sequence begin at {two[0]}, without padding at {one[0]}: they go on behind "
                "the length of this one, padding included, as where a counter that both share is not set back between"
            )
        if by == within.long - within.short:
            return f"positions are {end}: they count padding"
        return f"positions are {end}"
    if found.long.name in _TABLES and (read := _read(found)):
        return f"the rows {_span(read[1])} of a table are taken instead of {_span(read[0])}"
    if (less := _sums_to_less(short, long)) is not None:
        return (
            f"the weights of real keys sum to {less:.3g} in a row instead of 1: hidden keys take part in the softmax "
            "and are set to 0 behind it"
        )
    factor = _factor(short, long)
    if factor is not None:
        return f"all numbers are those without padding times {factor:.4g}{_ratio(amount, factor)}"
    if short.shape[-2:] == (within.short, within.short):
        return _pairs(short, long)
    if found.long.name in _REDUCING and short.shape == long.shape and within.long not in long.shape:
        return f"`{found.long.name}` over the sequence takes in what stands at padded positions, too"
    return "the numbers of real positions are other ones than without padding"


_REDUCING = ("mean", "var", "std", "var_mean", "std_mean", "sum", "amax", "max", "median", "norm", "logsumexp")


def _sums_to_less(short: Tensor, long: Tensor) -> float | None:
    """Return the mean of what rows of weights sum to, where each is that without padding times a factor below one."""
    if short.shape != long.shape or short.ndim < 3 or not bool((short >= 0).all()):
        return None
    usual, rows = short.sum(-1), long.sum(-1)
    is_softmax = float((usual - 1).abs().max()) < _NUMBER and bool((rows < 1 - _NUMBER).all() and (rows > 0).all())
    alike = is_softmax and float((long / rows[..., None] - short).abs().max()) < _NUMBER
    return float(rows.mean()) if alike else None


def _one_number(amount: _Amount, name: str, short: float, long: float) -> str:
    text = f"`{name}` gives {long:.4g} instead of {short:.4g}"
    for what, of in _SUMS.items():
        if abs(short - of(amount.within.short)) < _NUMBER and abs(long - of(amount.within.long)) < _NUMBER:
            return f"{text}, {what} of all positions, padded ones included"
    return f"{text}: it counts padded positions"


_SUMS = {
    "the number": float,
    "the sum of the weights 1, 2, 3, ...": lambda n: n * (n + 1) / 2,
    "the square root of the number": lambda n: n**0.5,
    "the logarithm of the number": lambda n: float(torch.tensor(float(n)).log()),
    "the inverse of the number": lambda n: 1 / n,
}


def _ratio(amount: _Amount, factor: float) -> str:
    short, long = amount.within.short, amount.within.long
    for name, of in _SUMS.items():
        if name == "the inverse of the number":
            continue
        if abs(factor - of(short) / of(long)) < _NUMBER * abs(factor):
            return f", which is {short} to {long} in {name} of positions: what they are divided by counts padded ones"
        if abs(factor - of(long) / of(short)) < _NUMBER * abs(factor):
            return f", which is {long} to {short} in {name} of positions: what multiplies them counts padded ones"
    return ""


def _factor(short: Tensor, long: Tensor) -> float | None:
    """Return by what all numbers are multiplied, if it is one."""
    if not short.is_floating_point() or short.numel() < 2:
        return None
    ratio = (long.double() / short.double()).flatten()
    ratio = ratio[short.flatten().abs() > 1e-6 * short.abs().max()]
    mean = float(ratio.mean())
    return mean if float((ratio - mean).abs().max()) < _NUMBER * abs(mean) else None


def _counted(x: Tensor) -> list[int] | None:
    """Return the numbers of a tensor that counts up by one along its one axis."""
    if sum(size > 1 for size in x.shape) != 1:
        return None
    numbers = x.flatten().double()
    if bool((numbers != numbers.round()).any()) or bool((numbers.diff() != 1).any()):
        return None
    return [int(n) for n in numbers]


def _span(places: list[int]) -> str:
    counted = len(places) > 2 and places == list(range(places[0], places[0] + len(places)))
    return f"{places[0]} to {places[-1]}" if counted else f"{places}"


def _read(found: Replaced) -> tuple[list[int], list[int]] | None:
    """Return which rows of a table a step took, in either run."""
    read = []
    for step in (found.short, found.long):
        tables = [x for x in step.inputs if x.ndim == 2 and x.is_floating_point()]
        rows = step.outputs[0]
        if not tables or rows.ndim < 2 or rows.shape[-1] != tables[0].shape[-1]:
            return None
        places = rows_of(rows.reshape(-1, rows.shape[-1]), tables[0])
        if -1 in places:
            return None
        read.append(places)
    short, long = read
    return (short, long) if short != long else None


def _pairs(short: Tensor, long: Tensor) -> str:
    """Say for which pairs of a query and a key the scores, or a bias, or indices, change."""
    what = "the scores" if short.is_floating_point() else "the distances or indices"
    short, long = short.double(), long.double()
    far = (long - short).abs().nan_to_num(0, 1e9, 1e9) > 1e-6 * short[short.isfinite()].abs().max()
    far = far.flatten(0, -3).any(0) if far.ndim > 2 else far
    later = torch.ones_like(far).triu(1)
    if not bool((far & ~later).any()):
        return f"{what} of keys behind the query, and of no others, change with the padded length"
    if not bool((far & ~later.T).any()):
        return f"{what} of keys before the query, and of no others, change with the padded length"
    if bool(far.all()) or bool((far | torch.eye(len(far), dtype=torch.bool)).all()):
        return f"{what} of real queries and real keys change with the padded length"
    many = f"{int(far.sum())} of {far.numel()}"
    return f"{what} of {many} pairs of a real query and a real key change with the padded length"


def _of_equal_length(masked: Masked, side: str) -> str | None:
    """Tell whether the sample alone is another one only where it is as long as the other sequence."""
    if masked.stream.kept is None or side != "right":
        return None
    kept = masked.kept
    try:
        masked.kept = kept[:, :_OTHER] if kept is not None else None
        long = 9
        x = masked.draw(1, long)
        parted = []
        for length in range(2, long):
            ones = torch.ones(1, length, dtype=torch.bool, device=x.device)
            alone, among = masked(x[:, :length], ones), masked(x, masked.padded(x, [length], side))
            got = among[:, :length] if masked.per_position else among
            if bool(masked.moved(got, alone).any()):
                parted.append(length)
        if parted != [_OTHER]:
            return None
        return _between_equals(masked, x)
    finally:
        masked.kept = kept


def _between_equals(masked: Masked, x: Tensor) -> str:
    text = "outputs change with padding only where both sequences are of one length without it"
    equal = attentions(lambda: masked(x[:, :_OTHER]))
    mask = masked.padded(x, [_OTHER], "right")
    padded = attentions(lambda: masked(x, mask))
    if len(equal) != len(padded):
        return text
    for a, b in zip(equal, padded, strict=True):
        if a.weights.shape[-2:] != (_OTHER, _OTHER) or a.weights.shape == b.weights.shape:
            continue
        rows, columns = (slice(0, _OTHER) if size > _OTHER else slice(None) for size in b.weights.shape[-2:])
        wide = b.weights[..., rows, :][..., columns]
        later = torch.ones(_OTHER, _OTHER, dtype=torch.bool).triu(1)
        shown, before = (w.cpu().flatten(0, -3).amax(0) > _LEAST for w in (a.weights, wide))
        if bool(before[later].all()) and not bool(shown[later].any()) and bool(shown[~later].all()):
            return (
                f"{text}: then cross-attention gives the keys behind each query's own position no weight, with other "
                "lengths it sees all: it is taken for self-attention by its shape and gets the causal mask"
            )
    return text
