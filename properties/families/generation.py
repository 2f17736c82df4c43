"""Generation: what is chosen, or drawn from, at each step is what the whole model says behind the text so far."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.diagnosis.caches.drafts import ECHO
from veriformer.properties.diagnosis.caches.generating import generate_cause
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.generation_beyond import BEYOND, judge_beyond, kept, longest_of
from veriformer.properties.families.generation_cuts import cut_cause, one_threshold
from veriformer.properties.families.generation_draws import as_weights, tokens_are_drawn
from veriformer.properties.families.generation_logits import generated
from veriformer.properties.families.translation import judge_translation

_MANNERS = ("without the cache", "with the cache", "with the cache a second time")


_UNDERFLOWS = 80.0
"""By so much below the largest logit float32 still has a probability: exp(-80) is 2e-35."""
_MANY = 6
"""Samples among which one threshold for all is looked for."""
_STEPS = 16
_PROMPTS = 8
"""Of which the two are taken that are gone on from in most words."""


@holds(
    "decoding.generate",
    statement="Greedy generation with the cache chooses the tokens that generation without it chooses.",
    formula="generate(x, cache) = generate(x, no cache) = repeated argmax f(x)",
    source="The cache is an optimisation; near-ties are left out.",
    kinds=("decoder", "encoder_decoder"),
    level="extended",
    unless=needs_part("generate"),
    examples_factor=0.5,
    catches=("KV02", "KV11"),
)
def generation_does_not_depend_on_the_cache(case: Case) -> None:
    """Twice with the cache, since a call may leave its own behind. Judged step by step against the argmax of the whole
    model; a step whose two best logits lie within rounding ends the comparison of that sample, since either may be
    chosen. Where the model is called once a step, and what it gives without the cache is what the whole model says, the
    logits with the cache are held to that too. Then past the longest sequence that the model takes, where it goes on at
    all: behind the last tokens; with the cache as well where positions are absolute. Of an encoder-decoder see
    `translation`.
    """
    if case.subject.kind == "encoder_decoder":
        judge_translation(case, _MANNERS)
        return
    built = case.built()
    tokens, steps = case.tokens(2, case.integer("T", 2, 4)), case.integer("steps", 2, 5)
    if case.walks_all_paths:  # what is drafted and taken back, or kept in blocks, shows in longer texts
        steps = min(_STEPS, (longest_of(case, built) or _STEPS) - tokens.shape[1])
        built, tokens = _telling(case, built, case.tokens(_PROMPTS, tokens.shape[1]), steps)
    is_plain = False
    for manner in _MANNERS:
        got, rows = generated(case, built, tokens, steps, use_cache=manner != "without the cache")
        for sample in range(2):
            _judge_greedy(case, built, got[sample], tokens[sample], manner)
        if rows is not None and (is_plain or manner == "without the cache"):
            is_plain = _judge_logits(case, built, got, rows, manner)
    if case.walks_all_paths:
        judge_beyond(case, built)
        _judge_echoes(case, built)
    case.witness()


def _judge_echoes(case: Case, built: Built) -> None:
    """Go on from texts whose last words stood there before, and were followed by others: what is looked up is refused.

    One word, or two, are what drafts are looked up by; a text without repeated ones has no drafts.
    """
    steps = min(_STEPS, (longest_of(case, built) or 1 << 30) - len(ECHO))
    if steps < 1 or (case.subject.longest or 1 << 30) < len(ECHO) + steps:
        return
    built, texts = _telling(case, built, case.tokens(_PROMPTS, max(ECHO) + 1)[:, list(ECHO)], steps)
    got, _ = generated(case, built, texts, steps, use_cache=True)
    for sample in range(2):
        _judge_greedy(case, built, got[sample], texts[sample], "with the cache, behind a text that repeats words")


def _telling(case: Case, built: Built, tokens: Tensor, steps: int) -> tuple[Built, Tensor]:
    """Return a model and two prompts that it goes on from in many words: in a text of one word all drafts are right.

    Args:
        case: of the property.
        built: with weights drawn anew; with those of its own initialisation it may say more.
        tokens: prompts `[B, T]`.
        steps: to go on.
    """
    raw = case.built(dtype=built.dtype, raw=True)
    found = []
    with off_the_record(case), torch.no_grad():
        for number, model in enumerate((built, raw)):
            text = tokens
            for _ in range(steps):
                text = torch.cat([text, case.call(model, text)[:, -1:].argmax(-1)], 1)
            found += [(len(set(row[tokens.shape[1] :])), -number, row) for row in text.tolist()]
    number = -max(found)[1]
    best = sorted((n for n in range(len(tokens))), key=lambda n: -found[number * len(tokens) + n][0])[:2]
    return (built, raw)[number], tokens[best]


def _judge_logits(case: Case, built: Built, got: Tensor, given: Tensor, manner: str) -> bool:
    """Hold the logits of each step to those of the whole model; without the cache, only tell whether they are these."""
    with torch.no_grad():
        whole = case.call(built, got)[:, got.shape[1] - given.shape[1] - 1 : -1].detach().double()
    if "without" in manner:
        return given.shape == whole.shape and _differ(given, whole) <= case.tolerance()
    case.close(
        given,
        whole,
        f"{manner}, what the next token is chosen from is not what the whole model says",
        cause=lambda: generate_cause(case, built, use_cache=True),
    )
    return True


def _differ(got: Tensor, expected: Tensor) -> float:
    return worst_difference(got, expected, size_of(expected)).error


def _judge_greedy(case: Case, built: Built, got: Tensor, prompt: Tensor, manner: str) -> None:
    length = len(prompt)
    case.require((got[:length] == prompt).all(), "generation changes its prompt", got=str(got.tolist()))
    with torch.no_grad():
        logits = case.call(built, got[None])[0].detach().double()
    for step in range(length, len(got)):
        row = logits[step - 1]
        best = row.topk(2).values
        if float(best[0] - best[1]) <= 2 * case.tolerance() * size_of(logits):
            return
        case.require(
            row.argmax() == got[step],
            f"{manner}, step {step - length + 1} does not choose the best token",
            got=f"token {int(got[step])} of logit {float(row[int(got[step])]):.4g}",
            expected=f"token {int(row.argmax())} of logit {float(best[0]):.4g}",
            cause=lambda: generate_cause(case, built, use_cache="without" not in manner),
        )


@holds(
    "decoding.sampling",
    statement="What generation draws from is the softmax of the last logits over the temperature, of the top k alone.",
    formula="p(x_t+1) = softmax(f(x_1..t)_t / tau), and 0 but for the k largest, divided by their sum",
    source="Definition of sampling; Fan et al. 2018, section 5.4 (top k).",
    kinds=("decoder",),
    level="extended",
    unless=needs_part("sampling"),
    requires=("causality.no-future-influence",),
    examples_factor=0.5,
    catches=("KV02", "KV11"),
)
def what_is_drawn_from_is_what_the_model_says(case: Case) -> None:
    """At temperatures above and below 1, with and without a top k, of texts that fit and of one that is longer than
    what the model takes: there the context is the last tokens, as many as are kept. Of thousands of samples tokens are
    drawn as often as the returned probabilities say, but for one run in a thousand million.
    """
    built, subject = case.built(), case.subject
    takes = inspect.signature(subject.sampling).parameters if subject.sampling is not None else {}
    temperature = case.choice("temperature", (1.0, 0.5, 2.0)) if "temperature" in takes else None
    top_k = case.choice("top_k", (None, 1, 3)) if "top_k" in takes else None
    tokens, steps = case.tokens(2, case.integer("T", 2, 4)), case.integer("steps", 2, 4)
    for text, drawn in _texts(case, built, tokens, steps, temperature, top_k):
        length = text.shape[1] - drawn.shape[1]
        longest = text.shape[1] if length == tokens.shape[1] else length + 1
        for step in range(drawn.shape[1]):
            end = length + step
            contexts = [text[:, max(end - n, 0) : end] for n in (kept(longest) if end > longest else (end,))]
            rows = [_last(case, built, one) for one in contexts]
            wanted = [_probabilities(row, temperature, top_k, drawn[:, step]) for row in rows]
            got = _ordered(drawn[:, step].detach().double(), wanted[0].shape[-1])
            nearest = _nearest(wanted, got)
            bound = 32 * (case.tolerance() * max(1.0, size_of(rows[0])) / min(temperature or 1.0, 1.0) + 2e-7)
            case.close(
                got, nearest, f"step {step + 1} does not draw from what the model says behind the text so far",
                bound=bound, constants_allowed=True,
                cause=partial(_other, case, built, text, end, got, temperature, top_k, longest),
            )  # fmt: skip
            if top_k is not None and len(rows) == 1 and got.shape == rows[0].shape:
                margin = 32 * case.tolerance() * max(1.0, size_of(rows[0]))
                case.require(
                    keeps_the_best(got, rows[0], top_k, temperature or 1.0, margin),
                    f"step {step + 1} does not draw from the {top_k} tokens of the largest logits, and from no other",
                    got=f"{[int(n) for n in (got > 0).sum(-1)]} tokens of the samples", expected=f"{top_k} of each",
                    cause=partial(_other, case, built, text, end, got, temperature, top_k, longest),
                )  # fmt: skip
    tokens_are_drawn(case, built, top_k)
    case.witness()


def keeps_the_best(got: Tensor, logits: Tensor, top_k: int, temperature: float, margin: float) -> Tensor:
    """Whether tokens surely among the k of the largest logits have a probability and tokens surely not have none.

    Args:
        got: probabilities `[B, V]`.
        logits: `[B, V]`.
        top_k: k.
        temperature: by which logits are divided: far below the largest one a probability underflows.
        margin: by which a logit must be off the k-th largest.
    """
    if top_k >= logits.shape[-1]:
        return torch.tensor(True)
    best = logits.topk(top_k + 1, dim=-1).values
    near = (logits.amax(-1, keepdim=True) - logits) / temperature < _UNDERFLOWS
    inside, outside = (logits > best[:, -1:] + margin) & near, logits < best[:, -2:-1] - margin
    return ~((inside & (got <= 0)) | (outside & (got > 0))).any()


def _nearest(wanted: list[Tensor], got: Tensor) -> Tensor:
    """Return the one of several right answers that is closest to what was given, chosen by torch.

    So the script of a failure chooses too, and is not held to what was closest before the mistake was mended.
    """
    if len(wanted) == 1:
        return wanted[0]
    each = torch.stack(wanted)
    return each[(each - got).abs().flatten(1).amax(1).argmin()]


def _texts(
    case: Case, built: Built, tokens: Tensor, steps: int, temperature: float | None, top_k: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    given: dict[str, Any] = {n: v for n, v in (("temperature", temperature), ("top_k", top_k)) if v is not None}
    prompts = [(tokens, steps)]
    if case.walks_all_paths and (longest := longest_of(case, built)) is not None:
        prompts.append((case.tokens(2, longest - 1), 1 + BEYOND))
    for number, (prompt, more) in enumerate(prompts):
        try:
            text, drawn = case.ask("sampling", prompt, more, built=built, **given)
        except SubjectError as problem:
            if number:
                return  # it says that it ends there
            if all(_can_be_drawn(case, built, one[None], more, given) for one in prompt):
                what = "a threshold of top_k, say" if top_k else "what is drawn from"
                raise SubjectError(
                    f"of two samples together nothing can be drawn, each alone can be: one of them is cut by what is "
                    f"that of the other, {what}: {problem}"
                ) from problem
            raise
        if text.shape != (2, prompt.shape[1] + more) or drawn.shape[:2] != (2, more):
            raise SubjectError("sampling did not return tokens [B, T + steps] and probabilities [B, steps, V]")
        yield text, case.apply(as_weights, drawn)


def _can_be_drawn(case: Case, built: Built, prompt: Tensor, steps: int, given: dict[str, Any]) -> bool:
    try:
        with off_the_record(case):
            case.ask("sampling", prompt, steps, built=built, **given)
    except SubjectError:
        return False
    return True


def _last(case: Case, built: Built, context: Tensor) -> Tensor:
    with torch.no_grad():
        return case.call(built, context)[:, -1].detach().double()


def _probabilities(row: Tensor, temperature: float | None, top_k: int | None, drawn: Tensor) -> Tensor:
    """Return what is to be drawn from `[B, V]`; `[B, k]`, the largest first, where what is drawn from has k entries."""
    if temperature is None:  # one of its own: read off the two ends of what it keeps
        p = drawn.detach().double().clamp(min=1e-300).log()
        order = row.argsort(-1, descending=True)[:, [0, 1]]
        ratio = (row.gather(-1, order).diff(dim=-1) / p.gather(-1, order).diff(dim=-1)) if p.shape == row.shape else 1.0
        temperature = float(ratio.median()) if isinstance(ratio, Tensor) else 1.0
        temperature = temperature if 0.05 < temperature < 20 else 1.0
    p = (row / temperature).softmax(-1)
    kept = row.shape[-1] if top_k is None else top_k
    if drawn.shape[-1] < row.shape[-1]:
        p = p.topk(drawn.shape[-1], dim=-1).values
    elif kept < row.shape[-1]:
        p = torch.where(row >= row.topk(kept, dim=-1).values[:, -1:], p, 0.0)
    return p / p.sum(-1, keepdim=True)


def _ordered(drawn: Tensor, width: int) -> Tensor:
    p = drawn / drawn.sum(-1, keepdim=True)
    return p if p.shape[-1] == width and width > 3 else p.sort(-1, descending=True).values


def _other(
    case: Case, built: Built, text: Tensor, end: int, got: Tensor, temperature: float | None, top_k: int | None,
    longest: int,
) -> str | None:  # fmt: skip
    """Say behind which other context, or at which other temperature, it would be right."""
    tau = temperature or 1.0
    own = text[:, max(0, end - longest) : end]
    with off_the_record(case):
        for told, context, scale in (
            (f"the first {longest} tokens: the context is cut at its end, not at its start", text[:, :longest], 1.0),
            ("a context without the newest token", text[:, : end - 1], 1.0),
            ("the newest token alone", text[:, end - 1 : end], 1.0),
            ("the text so far, the logits multiplied by the temperature, not divided", own, tau * tau),
            ("the text so far at temperature 1", own, tau),
        ):
            if not context.shape[1] or (scale == 1.0 and told.startswith("the text")):
                continue
            row = _last(case, built, context) * scale
            near = _probabilities(row, temperature, top_k, got)
            if near.shape == got.shape and float((near - got).abs().max()) < 1e-4:
                because = _undone(case, built, own, temperature, top_k) if told.endswith("temperature 1") else ""
                return f"it draws from what the model says behind {told}{because}"
        together = _of_the_batch(case, built, own, got, temperature, top_k)
        return together or cut_cause(_last(case, built, own), got, tau, top_k)


class _Divided(TorchFunctionMode):
    """Notes whether something is divided or multiplied by a number, and whether that is a row of probabilities."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number, self.probabilities, self.others = number, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").strip("_") in (
            "div",
            "div_",
            "truediv",
            "itruediv",
            "true_divide",
            "mul",
            "mul_",
        ):
            x, *by = args
            if any(_is_number(b, (self.number, 1 / self.number)) for b in by) and isinstance(x, Tensor):
                sums = x.detach().double().sum(-1)
                is_one = bool((x >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())
                self.probabilities, self.others = self.probabilities + is_one, self.others + (not is_one)
        return func(*args, **(kwargs or {}))


def _is_number(value: Any, wanted: tuple[float, float]) -> bool:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value)
    return isinstance(value, int | float) and any(abs(value - w) < 1e-6 * abs(w) for w in wanted)


def _undone(case: Case, built: Built, context: Tensor, temperature: float | None, top_k: int | None) -> str:
    """Say why a temperature changes nothing: where it is divided by, if it is."""
    given: dict[str, Any] = {n: v for n, v in (("temperature", temperature), ("top_k", top_k)) if v is not None}
    if temperature is None or temperature == 1:
        return ""
    with _Divided(temperature) as seen:
        case.ask("sampling", context, 1, built=built, **given)
    if seen.probabilities:
        return f": {temperature:g} divides the probabilities, behind the softmax, where normalising undoes it"
    return "" if seen.others else f": nothing is divided by the temperature that is given, {temperature:g}"


def _of_the_batch(
    case: Case, built: Built, context: Tensor, got: Tensor, temperature: float | None, top_k: int | None
) -> str | None:
    """Tell whether samples that are right alone change what one another is drawn from."""
    given: dict[str, Any] = {n: v for n, v in (("temperature", temperature), ("top_k", top_k)) if v is not None}
    logits = _last(case, built, context)
    alone, wanted = list[Tensor](), list[Tensor]()
    for sample, row in zip(context, logits, strict=True):
        _, drawn = case.ask("sampling", sample[None], 1, built=built, **given)
        wanted.append(_probabilities(row[None], temperature, top_k, drawn[:, 0])[0])
        alone.append(_ordered(as_weights(drawn)[:, 0], logits.shape[-1])[0])
    right = torch.stack(wanted)
    if right.shape != got.shape or float((torch.stack(alone) - right).abs().max()) > 1e-4:
        return None
    moved = right.roll(1, 0)
    if float((got - moved).abs().max()) < 1e-4:
        return "alone each sample draws as it should; in one batch each draws from what belongs to another sample"
    kept, many = ((p > 0).sum(-1).tolist() for p in (right, got))
    if torch.equal(got > 0, right > 0):
        return "alone each sample draws as it should; in one batch samples change one another's probabilities"
    because = None
    if top_k:  # of more samples the first is seldom the one with the largest threshold, or the least
        wide = case.tokens(_MANY, context.shape[1])
        _, drawn = case.ask("sampling", wide, 1, built=built, **given)
        because = one_threshold(_last(case, built, wide), _ordered(as_weights(drawn)[:, 0], logits.shape[-1]), top_k)
        because = because or one_threshold(logits, got, top_k)
    told = f"alone samples draw from {kept} tokens, in one batch from {many}"
    return f"{told}: {because or 'samples of one batch change from which tokens one another is drawn'}"
