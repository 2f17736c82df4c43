"""Losses over many tokens and large vocabularies: every chunk of tokens counts, and every block of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import takes_ignored_labels
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.watches import CostWatch
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.attention import long_row_bound
from veriformer.properties.definitions.losses import loss_of_rows
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.diagnosis.lengths import wrong_lengths
from veriformer.properties.engine.case import Case
from veriformer.properties.formulas.losses.sizes import in_chunks

TOKENS = (1, 5, 64, 65, 129, 1030)
"""Fewer than a chunk of the usual sizes, one chunk, one token more, and many."""

VOCABULARIES = (1000, 4099, 32_001, 50_000)
"""As large as those of released models, and no whole numbers of blocks."""

_EMPTY = {65: ((0, 64),), 1030: ((64, 192), (960, 1024))}
"""By the number of tokens, those whose labels are not counted: whole chunks, the first, one in the middle, the last."""

_PEAK = 12.0
"""Above exp(12) = 1.6e5, which outweighs 50,000 ordinary entries: who leaves out a block with it is far off."""


_MANY = 400
"""Operations of a call: a loop in Python, one in which more tokens take seconds."""

Told = Callable[[], str | None]


def every_chunk_counts(case: Case, small: Built, formula: Told) -> None:
    """Compare the loss and its gradient for many tokens, and for a large vocabulary where the loss can have one.

    Args:
        case: of `loss.definition`.
        small: the loss as it was built for the drawn sizes.
        formula: names the formula that gives the subject's loss.
    """
    hides, right = takes_ignored_labels(case.bench, small), 0
    for tokens in TOKENS:
        given = _long(small, case.generator, tokens, _EMPTY.get(tokens, ()) if hides else (), case)
        cause = partial(_tokens_cause, case, small, right, tokens)
        calls = _compare(case, small, *given, f"for {tokens} tokens", cause, formula if tokens < TOKENS[-1] else None)
        if not calls:
            return
        if calls > _MANY:
            break
        right = right if hides and tokens in _EMPTY else tokens
    size = case.choice("V", VOCABULARIES)
    large = case.built_at(small.dtype, vocab_size=size if _is_short(case, small) else VOCABULARIES[0])
    if large is not None:
        given, size = _wide(large, case.generator, case), large.config.vocab_size
        _compare(case, large, *given, f"for a vocabulary of {size}", partial(_vocabulary_cause, case, small, size))


def _is_short(case: Case, small: Built) -> bool:
    """Whether a call costs few operations for a thousand labels: else it is a loop over them, or over small blocks."""
    key = ("few operations", small.dtype)
    if key not in case.bench.measured:
        with off_the_record(case):
            built = case.built_at(small.dtype, vocab_size=VOCABULARIES[0])
            generator = torch.Generator().manual_seed(1)
            try:
                with CostWatch() as watch:
                    case.call(built or small, *_wide(built or small, generator, case))
                case.bench.measured[key] = watch.calls <= _MANY // 5
            except SubjectError:
                case.bench.measured[key] = True
    return bool(case.bench.measured[key])


def _long(
    built: Built, generator: torch.Generator, tokens: int, empty: tuple[tuple[int, int], ...], case: Case
) -> tuple[Tensor, Tensor]:
    """Return logits and labels of so many tokens that are to be predicted, without the labels of whole chunks."""
    size, shift = built.config.vocab_size, _shift(case)
    logits = torch.randn(1, tokens + shift, size, generator=generator, dtype=torch.float64)
    labels = that_count(case, torch.randint(0, size, (1, tokens + shift), generator=generator))
    for start, end in empty:
        labels[:, start + shift : end + shift] = _ignore(case)
    return logits.to(case.bench.device, built.dtype), labels.to(case.bench.device)


def _wide(built: Built, generator: torch.Generator, case: Case) -> tuple[Tensor, Tensor]:
    """Return logits and labels in the first, the middle and the last block of the vocabulary, and at blocks' edges.

    Every other token foretells its label; the next one what stands at the other end of the vocabulary.
    """
    size, shift = built.config.vocab_size, _shift(case)
    edges = (n + more for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) for more in (-1, 0) if n < size)
    wanted = torch.tensor([0, 1, size // 2, size // 2 + 1, *edges, size - 1, size - 2])
    logits = torch.randn(1, len(wanted) + shift, size, generator=generator, dtype=torch.float64)
    foretold = torch.where(torch.arange(len(wanted)) % 2 == 0, wanted, size - 1 - wanted)
    logits[0, torch.arange(len(wanted)), foretold] += _PEAK
    labels = that_count(case, torch.cat([wanted[:shift], wanted])[None])
    return logits.to(case.bench.device, built.dtype), labels.to(case.bench.device)


def that_count(case: Case, labels: Tensor) -> Tensor:
    """Return labels of which each counts: without 0 where it may be that of the padding, which nobody declared."""
    hidden = case.subject.fact("ignore_index", 0)
    return torch.where(labels == hidden, hidden + 1 if hidden < 2 else hidden - 1, labels)


def _shift(case: Case) -> int:
    return int(bool(case.subject.fact("shifts_labels")))


def _ignore(case: Case) -> int:
    return int(case.subject.fact("ignore_index", -100))


def _expected(case: Case, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss and its gradient in float64, with a bound on what rounding does to each.

    A log-softmax errs by some units of its largest logit, and by V u for its sum; so does a mean of V logits, weighed
    by the smoothing; a mean of n terms by n u of the largest. In the gradient (`loss_of_rows`) the probabilities err as
    in `long_row_bound`, the target by some units. Where a maximum is not detached the errors of all that stand in its
    row remain at it, so their sum bounds each entry. Twice, for what is of second order.
    """
    fact, shift, unit = case.subject.fact, _shift(case), epsilon(logits.dtype)
    smoothing, z_loss = (float(fact(name, 0.0)) for name in ("label_smoothing", "z_loss"))
    kept, targets = logits[:, : logits.shape[1] - shift], labels[:, shift:]
    loss, slope = loss_of_rows(kept, targets, smoothing, _ignore(case), z_loss)
    width, tokens = kept.shape[-1], targets.numel()
    largest, counted = float(kept.abs().max()), max(int((targets != _ignore(case)).sum()), 1)
    log_z = float(kept.double().logsumexp(-1).abs().max())
    weight = 1 + 2 * z_loss * log_z
    one = unit * (4 * largest + width * (2 + smoothing * largest) + 4 * math.log(width))
    bound = weight * (one + unit * tokens * (2 * largest + log_z))
    exact = kept.double().softmax(-1)
    error = long_row_bound(kept, exact, kept.dtype).sum(-1, keepdim=True) + 8 * unit
    errors = (2 * weight / counted * error).expand_as(slope)
    if shift:
        nothing = torch.zeros_like(slope[:, :1])
        slope, errors = torch.cat([slope, nothing], dim=1), torch.cat([errors, errors[:, :1]], dim=1)
    return loss, slope, torch.tensor(bound, dtype=torch.float64), errors


def _compare(
    case: Case,
    built: Built,
    logits: Tensor,
    labels: Tensor,
    what: str,
    cause: partial[str | None],
    formula: Told | None = None,
) -> int:
    """Compare one loss and its gradient; return how many operations the call took, 0 if it refuses such inputs."""
    given = logits.clone().requires_grad_()
    try:
        with CostWatch() as watch:
            loss = case.call(built, given, labels)
    except SubjectError:  # it is built for fewer tokens, or for another vocabulary
        return 0
    expected, slope, bound, errors = _expected(case, logits, labels)
    got = loss.detach().double().reshape(())
    case.close(
        got,
        expected,
        f"{what} the loss is not the mean of the negative log likelihoods",
        bound=float(bound),
        cause=lambda: _first_of(cause(), formula),
    )
    (gradient,) = torch.autograd.grad(loss.sum(), given)
    case.close(gradient, slope, f"{what} the gradient of the loss is wrong", bound=errors, cause=cause)
    return watch.calls + 1


def _first_of(told: str | None, formula: Told | None) -> str | None:
    """Return what was told of lengths where some are right; else the formula that gives the loss, which fits by chance
    where many tokens count.
    """
    if formula is None or (told and told.startswith("right")):
        return told
    return formula() or told


def _is_wrong(case: Case, built: Built, given: tuple[Tensor, Tensor]) -> bool:
    leaf = given[0].clone().requires_grad_()
    loss = case.call(built, leaf, given[1])
    expected, slope, bound, errors = _expected(case, *given)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    right = bool((loss.detach().double().reshape(()) - expected).abs() <= bound)
    return not (right and bool(((gradient.double() - slope).abs() <= errors).all()))


def _tokens_cause(case: Case, built: Built, right: int, wrong: int) -> str | None:
    """Say from which number of tokens on a loss is wrong, or that it is where no label of a chunk is counted."""

    def is_wrong(tokens: int) -> bool:
        return _is_wrong(case, built, _long(built, torch.Generator().manual_seed(tokens), tokens, (), case))

    with off_the_record(case):
        if not _shift(case) and (told := _chunks_alike(case, built, wrong)):
            return told
        if wrong not in _EMPTY or is_wrong(wrong):
            return wrong_lengths(is_wrong, right, wrong, "tokens")
        few = _long(built, torch.Generator().manual_seed(1), 5, ((1, 3),), case)
        if _is_wrong(case, built, few):
            return None  # not counting goes wrong at every length
        chunks = []
        for start, end in _EMPTY[wrong]:
            given = _long(built, torch.Generator().manual_seed(wrong), wrong, ((start, end),), case)
            if _is_wrong(case, built, given):
                chunks.append(f"{start} to {end - 1}")
    told = f"right with {wrong} tokens whose labels all count, wrong where none"
    return f"{told} of the tokens {' or '.join(chunks)} does" if chunks else None


def _chunks_alike(case: Case, built: Built, tokens: int) -> str | None:
    """Tell whether the mean of the means of chunks is taken, or labels are moved inside each of them."""
    shift = int(bool(case.subject.fact("shifts_labels")))

    def right(logits: Tensor, labels: Tensor) -> Tensor:
        eps, z_loss = (float(case.subject.fact(name, 0.0)) for name in ("label_smoothing", "z_loss"))
        rows = logits[:, : logits.shape[1] - shift]
        return loss_of_rows(rows, labels[:, shift:], eps, _ignore(case), z_loss)[0]

    size = built.config.vocab_size
    return in_chunks(lambda x, y: case.call(built, x, y), right, tokens, size, built.dtype, shift)


def _vocabulary_cause(case: Case, small: Built, wrong: int) -> str | None:
    """Say from which size of the vocabulary on a loss is wrong."""

    def is_wrong(size: int) -> bool:
        built = case.built_at(small.dtype, vocab_size=size)
        if built is None or size < 4:
            return False
        return _is_wrong(case, built, _wide(built, torch.Generator().manual_seed(size), case))

    with off_the_record(case):
        return wrong_lengths(is_wrong, small.config.vocab_size, wrong, "entries of the vocabulary")
