"""The loss that a model gives: that of its own logits, each scored by the label that it is to foretell."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.losses import changed, follows_labels, loss_of_rows, mean_over_counted
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.diagnosis.model_losses import Scored, scored, uncounted
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.loss_gradients import gradient_is_that_of_the_logits, mean_loss

_KINDS = ("decoder", "encoder", "encoder_decoder", "classifier")
_USUAL = -100


@holds(
    "loss.of-model",
    statement="The loss that a model gives is the mean of -log p(label) by its own logits, at one offset of labels.",
    formula="L(x, y) = -1/n sum_t log softmax(f(x)_t)(y_{t+s}), s = 0 or 1; over the labels that count",
    source="Vaswani et al. 2017, 5.4; documented bugs LS01, LS04, LS13.",
    kinds=_KINDS,
    unless=needs_part("loss"),
    examples_factor=0.5,
    catches=("LS01", "LS04"),
)
def the_loss_is_that_of_the_logits(case: Case) -> None:
    """A decoder foretells y_t (labels that are moved already) or y_{t+1} (moved inside); the label of an earlier token
    it has seen, and one two ahead is moved twice. What depends on the labels as it must and is more than the mean
    (smoothing, a term of the routers) is a question. Then labels that are not counted: the mean is over the others,
    and no token of the vocabulary is one of them unless it pads. Its gradient is that of the same loss of its logits.
    """
    built = case.built()
    inputs = _inputs(case, built)
    logits = case.call(built, *inputs).detach()
    size = logits.shape[-1]
    if size < 3 or not logits.is_floating_point():
        case.does_not_apply("its outputs are no logits of several classes")
    pads = padding_ids(built.module)
    pool = _pool(case, logits, pads)
    labels = _labels(case, logits, pool)
    value = _loss(case, built, inputs, labels)
    seen = scored(lambda y: _loss(case, built, inputs, y), logits, labels, pool, _offsets(case, logits))
    limit = _limit(case, logits)
    eps, z_loss = (float(case.subject.fact(name, 0.0)) for name in ("label_smoothing", "z_loss"))
    asks: tuple[str, Any] | None = None
    if seen.offset is not None and case.subject.fact("plain_loss") is not False:
        asks = ("plain_loss", False)
    if asks and seen.smoothing is not None:
        asks = ("label_smoothing", seen.smoothing)
    if seen.offset not in (0, 1):
        _judge_changes(case, built, inputs, logits, labels, pool, seen)
    assert seen.offset is not None
    _judge_offset(case, seen.offset)
    kept, wanted = moved(logits, labels, seen.offset)
    if case.subject.fact("plain_loss") is not False:
        expected, _ = loss_of_rows(kept, wanted, eps, _USUAL, z_loss)
        case.close(
            value.double().reshape(()), expected, "the loss is not the mean of -log p(label) by the model's own logits",
            bound=limit, asks=asks, cause=lambda: seen.told,
        )  # fmt: skip
        if not case.subject.fact("inference_only"):
            kept, _ = moved(case.call(built, *inputs), labels, seen.offset)
            right = case.apply(mean_loss, kept, wanted, eps, z_loss)
            gradient_is_that_of_the_logits(case, built, case.ask("loss", *inputs, labels, built=built), right)
        _judge_uncounted(case, built, inputs, logits, labels, seen.offset, pads, limit)
    case.witness()


def _judge_changes(
    case: Case, built: Built, inputs: tuple[Tensor, ...], logits: Tensor, labels: Tensor, pool: list[int], seen: Scored
) -> None:
    """Say that no offset, or a wrong one, has the loss follow the labels: on a few of them, that a script can show."""
    if seen.offset is None:
        told = "no offset of the labels has the loss depend on them as the log likelihoods of its logits do"
        got, expected = (
            "a loss that follows the log likelihoods of no such label",
            "the label of the same position, or of the next one",
        )
    else:
        told = f"each output is scored by the label of a token {_far(seen.offset)}"
        got, expected = f"row t of the logits is scored by label t {seen.offset:+d}", "label t, or t + 1"
    cause: Callable[[], str | None] = lambda: seen.cause if seen.offset is None else _cause_of(seen.offset)  # noqa: E731
    if labels.ndim == 2:
        others = changed(labels, pool)
        losses = torch.stack([_loss(case, built, inputs, y) for y in (labels, *others)])
        follows = case.apply(follows_labels, logits, labels, others, losses)
        case.require(follows, told, got=got, expected=expected, cause=cause)
    case.require(torch.tensor(False), told, got=got, expected=expected, cause=cause)


def moved(logits: Tensor, labels: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return the rows `[1, N, V]` and the labels `[1, N]` that they are scored by, where row t has label t + offset."""
    if labels.ndim == 1:
        return logits[None], labels[None]
    end = logits.shape[1] - offset
    return logits[:, :end], labels[:, offset:]


def padding_ids(module: Any) -> set[int]:
    """Return the ids that a model calls padding: of its tables, and of attributes of such names."""
    found: set[int] = set()
    for part in module.modules() if isinstance(module, nn.Module) else ():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            found.add(part.padding_idx)
        own = [v for n, v in vars(part).items() if n in ("config", "cfg", "args") and hasattr(v, "__dict__")]
        for holder in (vars(part), *map(vars, own)):
            found |= {v for n, v in holder.items() if "pad" in n and "id" in n.replace("idx", "id") and type(v) is int}
    return found


def _inputs(case: Case, built: Built) -> tuple[Tensor, ...]:
    length = case.integer("T", 4, 7)
    lengths = (length + 1, length) if case.subject.kind == "encoder_decoder" else (length,)
    if case.subject.takes_tokens:
        return tuple(case.tokens(2, n) for n in lengths)
    return tuple(case.normal(2, n, built.config.d_model, dtype=built.dtype) for n in lengths)


def _pool(case: Case, logits: Tensor, pads: set[int]) -> list[int]:
    """Return labels that count: classes, or tokens but those that pad and 0, which often does where nothing says so."""
    left_out = {case.subject.fact("ignore_index"), *({0, *pads} if logits.ndim > 2 else ())}
    return [n for n in range(logits.shape[-1]) if n not in left_out]


def _labels(case: Case, logits: Tensor, pool: list[int]) -> Tensor:
    drawn = torch.randint(0, len(pool), logits.shape[:-1], generator=case.generator)
    return torch.tensor(pool)[drawn].to(logits.device)


def _loss(case: Case, built: Built, inputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    value = case.ask("loss", *inputs, labels, built=built)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise SubjectError("loss did not return a scalar")
    return value.detach().reshape(())


def _offsets(case: Case, logits: Tensor) -> tuple[int, ...]:
    """Return the offsets to look for, those that may be right first."""
    if logits.ndim == 2:
        return (0,)
    return (0, 1, -1, 2, -2) if logits.shape[1] > 2 else (0, 1)


def _limit(case: Case, logits: Tensor) -> float:
    """Return what rounding may do: a loss in float32 of these logits, and what the logits themselves err by."""
    largest, size = size_of(logits), logits.shape[-1]
    unit = max(epsilon(logits.dtype), epsilon(torch.float32))
    return unit * (8 * largest + 2 * size + 8 * math.log(size)) + 4 * case.tolerance() * max(1.0, largest)


def _far(offset: int) -> str:
    return f"{abs(offset)} {'back, which it has seen' if offset < 0 else 'ahead'}"


def _cause_of(offset: int) -> str:
    if offset < 0:
        return "logits and labels are moved the wrong way round: logits of t + 1 against the label of t"
    return f"the labels are moved by {offset}"


def _judge_offset(case: Case, offset: int) -> None:
    """Hold the offset to what is declared, and ask where it is not what the name of the argument says."""
    subject = case.subject
    if subject.kind != "decoder" and subject.guesses.get("shifts_labels") is None:
        case.require(
            torch.tensor(offset == 0), "the labels are moved, though each output is to foretell its own label",
            got=f"row t is scored by label t + {offset}", expected="label t",
            asks=("shifts_labels", True) if subject.fact("shifts_labels") is None else None,
        )  # fmt: skip
        return
    declared, guessed = subject.fact("shifts_labels"), subject.guesses.get("shifts_labels")
    if declared is None:
        return
    is_by_name = guessed is not None and guessed == declared  # what is declared as well is no question
    case.require(
        torch.tensor(offset == int(declared)),
        _by_name(moves_inside=bool(guessed)) if is_by_name else "the labels are not moved as is declared",
        got=f"row t is scored by label t + {offset}", expected=f"label t + {int(declared)}",
        cause=lambda: f"the labels are {'not moved' if offset == 0 else 'moved by one'} by the loss itself"
        + f" (declare shifts_labels={bool(offset)} if that is meant)" * is_by_name,
    )  # fmt: skip


def _by_name(*, moves_inside: bool) -> str:
    """Return what is odd about an offset that is not what the name of the argument says."""
    if moves_inside:
        return (
            "by the name of its argument the loss is given the tokens and moves them by one, and it does not: each "
            "output would be scored by the token that it has just seen"
        )
    return (
        "by the name of its argument the loss is given what each output is to foretell, and it moves that by one: "
        "whoever hands over the next tokens has them moved twice"
    )


def _judge_uncounted(
    case: Case, built: Built, inputs: tuple[Tensor, ...], logits: Tensor, labels: Tensor, offset: int, pads: set[int],
    limit: float,
) -> None:  # fmt: skip
    """See which labels are not counted, and that the mean is over the others then."""
    subject = case.subject
    declared = subject.fact("ignore_index")
    if labels.ndim == 1 or labels.numel() < 4:
        return
    size = logits.shape[-1]
    candidates = dict.fromkeys([*([] if declared is None else [declared]), _USUAL, -1, *sorted(pads), 0])
    for label in [n for n in candidates if n < size]:
        what = uncounted(lambda y: _loss(case, built, inputs, y), logits, labels, offset, label, limit)
        ask = partial(_mean_over, case, built, inputs, logits, labels, offset, label, limit)
        if label == declared and what not in ("not counted", "refused"):
            told = f"label {label} is declared not to count"
            ask(label, told, cause=lambda w=what, n=label: f"label {n}: {w}")  # type: ignore[misc]
        if label == declared:
            case.require(
                torch.tensor(what == "not counted"), f"label {label} is declared not to count",
                got=what, expected="the mean over the others", cause=lambda w=what, n=label: f"label {n}: {w}",  # type: ignore[misc]
            )  # fmt: skip
        if what == "divided by all":
            told = f"label {label} is left out of the sum, and the sum is divided by all positions"
            ask(label, told, cause=lambda: "the sum is divided by all positions, not by those counted")
        case.require(
            torch.tensor(what != "divided by all"),
            f"label {label} is left out of the sum, and the sum is divided by all positions",
            got="a smaller loss the more labels do not count", expected="the mean over those that count",
            cause=lambda: "the sum is divided by all positions, not by those counted",
        )  # fmt: skip
        if label >= 0 and label != declared and what == "not counted" and label not in pads:
            known = declared if declared is not None else (min(pads) if pads else None)
            case.require(
                torch.tensor(False), f"label {label}, a token of the vocabulary, is not counted",
                got="the mean over the others", expected="a loss for every token that is no padding",
                cause=lambda n=label, k=known: f"label {n} is not counted" + (  # type: ignore[misc]
                    f" (declare ignore_index={n} if that is meant)" if k is None else f", where {k} pads"
                ),
                asks=("ignore_index", label) if known is None else None,
            )  # fmt: skip


def _mean_over(
    case: Case, built: Built, inputs: tuple[Tensor, ...], logits: Tensor, labels: Tensor, offset: int, label: int,
    limit: float, left_out: int, told: str, *, cause: Callable[[], str],
) -> None:  # fmt: skip
    """Hold the loss of labels, some of them replaced by one, to the mean over those that are not left out."""
    given = labels.clone()
    given[0, 1], given[-1, -1] = label, label
    if given.shape[1] > 4:  # not as many in each sample
        given[0, 2] = label
    expected = case.apply(mean_over_counted, logits, given, offset, left_out)
    case.close(_loss(case, built, inputs, given).double(), expected, told, bound=limit, cause=cause)
