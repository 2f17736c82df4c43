"""Decoding: a cache changes the time, not the answer."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.adapters.unknown.written import source_of
from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import tolerance_of
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.diagnosis.caches.beams import beam_cause
from veriformer.properties.diagnosis.caches.cached import cache_cause
from veriformer.properties.diagnosis.caches.padded_cache import padded_cause
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.chunked import cached_outputs
from veriformer.properties.engine.premises import excludes_fact, needs_mask, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.causality import leak_of
from veriformer.properties.subject.subject import Subject

_KIND = ("decoder",)


def cache_takes_mask(subject: Subject) -> str | None:
    """Apply only where the cache takes a mask."""
    if subject.cache is None:
        return "the subject offers no cache"
    parameters = inspect.signature(subject.cache).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return None if any_name or "attention_mask" in parameters else "its cache takes no attention_mask"


def with_cache(
    case: Case,
    built: Built,
    chunks: list[Tensor],
    mask: Tensor | None = None,
    reorder: Tensor | None = None,
    source: Tensor | None = None,
) -> Tensor:
    """Return the outputs `[B, T, *]` of chunks of tokens, one after another, through the subject's cache."""
    if chunks[0].shape[1] < case.subject.shortest:
        case.reject(f"it is declared to take no sequence shorter than {case.subject.shortest}")
    offered = {"attention_mask": mask, "reorder": reorder}
    given = {name: value for name, value in offered.items() if value is not None}
    with torch.no_grad():  # as in generation: a cache that a model keeps holds no graph
        before = () if source is None else (source,)
        return cached_outputs(case.bench, built.module, *before, chunks, **given)


def cut(case: Case, x: Tensor, pads: int = 0) -> list[Tensor]:
    """Cut a sequence into chunks: single tokens, a prompt and single tokens, two halves, or anything.

    With `pads` the first chunk is a prompt that holds them all and one real token, as batched generation has it.
    """
    if pads:
        rest = x[:, pads + 1 :]
        return [x[:, : pads + 1], *(cut(case, rest) if rest.shape[1] > 1 else rest.split(1, dim=1))]
    length = x.shape[1]
    forms = ("single", "prompt", "halves", "mixed")
    form = case.choice("chunks", forms[:2] if case.subject.fact("cached_chunks") is False else forms)
    if form == "single":
        sizes = [1] * length
    elif form == "prompt":
        prompt = case.integer("prompt", 1, length - 1)
        sizes = [prompt, *[1] * (length - prompt)]
    elif form == "halves":
        sizes = [length // 2, length - length // 2]
    else:
        sizes, left = [], length
        while left:
            sizes.append(case.integer("chunk", 1, min(3, left)))
            left -= sizes[-1]
    return list(x.split(sizes, dim=1))


@holds(
    "decoding.cache",
    statement="Decoding chunk by chunk through the cache gives what the whole sequence gives at once.",
    formula="f_cache(x_1..a), f_cache(x_a+1..b), ... = f(x), for every cut",
    source="Keys and values of the past do not change: a consequence of causality (Shazeer 2019, section 2.4).",
    kinds=(*_KIND, "encoder_decoder", "self_attention", "layer"),
    unless=needs_part("cache"),
    sweeps_lengths=True,
    farthest=129,
    requires=("causality.no-future-influence",),
    catches=("KV01", "KV02", "KV08", "KV11", "RB05"),
    steps=True,
)
def the_cache_changes_nothing(case: Case) -> None:
    """Single tokens hide a mask that is wrong inside a chunk, whole prompts hide positions that do not go on; so all
    forms of cut are drawn, and another sequence is decoded before, that must leave nothing behind. Of two sequences the
    target is cut, and what is decoded before has another source of the same shape.
    """
    built, length = case.built(), case.length("T", low=2)
    if case.subject.kind == "encoder_decoder":
        _targets_through_the_cache(case, built, length)
        return
    x = _drawn(case, built, length)
    expected = case.call(built, x)
    if case.choice("another before", (True, False)):  # what a model keeps from an earlier case would make it smaller
        _decoded_before(case, built, length)
    chunks = cut(case, x)
    got = with_cache(case, built, chunks)
    sizes = [chunk.shape[1] for chunk in chunks]
    by_trying = source_of(case.subject.cache) is not None  # nobody said that it takes several tokens behind others
    asks = ("cached_chunks", False) if by_trying and max(sizes[1:]) > 1 else None
    case.close(got, expected, "decoding through the cache gives another output than the whole sequence at once",
               asks=asks,
               cause=lambda: (_left_over(case, built, chunks, expected) or _traced_cause(case, built, x, sizes)
                              or _cause(case, got, expected, sizes)))  # fmt: skip
    case.witness()


def _decoded_before(case: Case, built: Built, length: int) -> None:
    """Decode another sequence; where the cache takes a mask, one position of its first sample is hidden."""
    other, mask = _drawn(case, built, length), None
    if case.subject.cache and "attention_mask" in inspect.signature(case.subject.cache).parameters:
        mask = torch.ones(2, length, dtype=torch.bool, device=other.device)
        mask[0, -1 if case.subject.fact("padding_side") == "right" else 0] = False
    try:
        with_cache(case, built, [other], mask if case.subject.takes_mask("padding") else None)
    except SubjectError:
        if mask is None:
            raise
        case.reject("its cache does not take this mask")


def _left_over(case: Case, built: Built, chunks: list[Tensor], expected: Tensor) -> str | None:
    """Say that a new model is right, and what was decoded before it was not."""
    with off_the_record(case):
        model = case.bench.pool.fresh(built.config, built.dtype, raw=built.is_raw)
        again = with_cache(case, model, chunks)
        after = with_cache(case, model, chunks)
    limit = case.tolerance()
    if worst_difference(again, expected, size_of(expected)).error > limit:
        return None
    is_left = worst_difference(after, expected, size_of(expected)).error > limit
    if is_left and case.subject.takes_tokens:
        return None  # of tokens more is said
    hidden = "" if is_left or cache_takes_mask(case.subject) else ", of which a position was hidden"
    return (
        f"right on a new model, and wrong after another sequence was decoded{hidden}: what is kept of that (keys, a "
        "mask, a count) is used again"
    )


def _targets_through_the_cache(case: Case, built: Built, length: int) -> None:
    sources = case.integer("S", 1, 7)
    source, target = case.tokens(2, sources), case.tokens(2, length)
    expected = case.call(built, source, target)
    if case.choice("another before", (True, False)):
        with_cache(case, built, [case.tokens(2, length)], source=case.tokens(2, sources))
    chunks = cut(case, target)
    got = with_cache(case, built, chunks, source=source)
    sizes = [chunk.shape[1] for chunk in chunks]

    def why() -> str | None:
        with off_the_record(case):
            new = case.bench.pool.fresh(built.config, built.dtype, raw=built.is_raw)
            again = with_cache(case, new, chunks, source=source)
        if worst_difference(again, expected, size_of(expected)).error <= case.tolerance():
            return "right on a new model, and wrong after a run of another source: what is kept of that is used again"
        return cache_cause(case, built, target, sizes) or _cause(case, got, expected, sizes)

    case.close(
        got, expected, "decoding through the cache gives another output than the whole sequence at once", cause=why
    )
    case.witness()


def _drawn(case: Case, built: Built, length: int) -> Tensor:
    """Return two sequences: of tokens, or of vectors where the subject takes those."""
    if case.subject.takes_tokens:
        return case.tokens(2, length)
    return case.normal(2, length, built.config.d_model, dtype=built.dtype)


def _traced_cause(case: Case, built: Built, x: Tensor, sizes: list[int]) -> str | None:
    if case.subject.takes_tokens:
        return cache_cause(case, built, x, sizes)
    with off_the_record(case):
        whole, one_by_one = case.call(built, x), with_cache(case, built, list(x.split(1, dim=1)))
        is_right = worst_difference(one_by_one, whole, size_of(whole)).error <= case.tolerance()
    if not is_right:
        return None
    return "one token at a time all is right: a chunk of several behind others sees other keys, its mask is wrong there"


def _cause(case: Case, got: Tensor, expected: Tensor, sizes: list[int]) -> str | None:
    """Say where the two part."""
    limit = worst_difference(expected, torch.zeros_like(expected)).error * case.tolerance()
    wrong = ((got - expected).abs().amax(dim=(0, 2)) > limit).nonzero().flatten().tolist()
    if not wrong:
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if wrong[0] == 0:
        return "the first output is wrong already: the cache is not empty at the start, or keys or values are mixed up"
    if wrong[0] in starts:
        return (
            f"outputs part where chunk {starts.index(wrong[0]) + 1} begins: the past, or its positions, are lost there"
        )
    return f"outputs part inside a chunk, at position {wrong[0]}: its mask does not fit the cached past"


@holds(
    "decoding.left-padding",
    statement="Decoding with the cache and left padding gives what the whole padded batch gives.",
    formula="f_cache(chunks, mask) = f(x, mask) at real positions",
    source="Batched generation pads prompts on the left.",
    kinds=_KIND,
    level="extended",
    unless=(cache_takes_mask, needs_mask("padding")),
    requires=("decoding.cache",),
    catches=("KV10",),
)
def left_padding_goes_through_the_cache(case: Case) -> None:
    """The mask of the past must be kept with the cache, and positions counted from the first real token. The padding
    stands in the prompt: a token that is decoded alone is never padding.
    """
    if case.subject.fact("padding_side") not in ("left", "both"):
        case.does_not_apply("left padding is not declared to be supported (padding_side)")
    if case.subject.cache and "attention_mask" not in inspect.signature(case.subject.cache).parameters:
        case.does_not_apply("its cache takes no `attention_mask`")
    built, length = case.built(), case.integer("T", 4, 8)
    x = case.tokens(2, length)
    pads = case.integer("pads", 1, length - 2)
    mask = torch.ones(2, length, dtype=torch.bool, device=x.device)
    mask[0, :pads] = False
    expected = case.call(built, x, attention_mask=mask)
    got = with_cache(case, built, cut(case, x, pads), mask)
    case.close(
        got[mask],
        expected[mask],
        "with left padding the cache gives another output than the whole batch at once",
        cause=lambda: padded_cause(case, built),
    )
    case.witness()


def _reorders(subject: Subject) -> str | None:
    """Apply only where the cache can be reordered."""
    if subject.cache is None:
        return "the subject offers no cache"
    names = inspect.signature(subject.cache).parameters
    return None if "reorder" in names else "its cache takes no `reorder`"


@holds(
    "decoding.beam-reorder",
    statement="After the samples of a cache are reordered each goes on as the sample that it was taken from.",
    formula="f_cache(a; cache[i]; b)_n = f(a_i(n), b_n)",
    source="Beam search keeps the best continuations, several of one sample perhaps; documented bugs KV05, KV07, KV10.",
    kinds=_KIND,
    level="extended",
    unless=_reorders,
    requires=("decoding.cache",),
    catches=("KV05", "KV07", "KV10"),
)
def a_reordered_cache_goes_on(case: Case) -> None:
    """One sample is taken twice and one dropped; with left padding the mask must go along with the keys."""
    built = case.built()
    first, second = case.integer("past", 2, 4), case.integer("new", 1, 3)
    x, new = case.tokens(3, first), case.tokens(3, second)
    order = torch.tensor(case.choice("order", ([1, 1, 0], [2, 0, 1], [0, 0, 0])), device=x.device)
    mask = whole = None
    padded = case.subject.takes_mask("padding") and not cache_takes_mask(case.subject)
    padded = padded and case.subject.fact("padding_side") in ("left", "both")
    if padded and case.flag("padded"):
        mask = torch.ones(3, first + second, dtype=torch.bool, device=x.device)
        mask[slice(0, 1 if case.subject.fact("reorders_mask", True) else None), : first - 1] = False
        whole = torch.cat([mask[order, :first], mask[:, first:]], dim=1)
    expected = case.call(built, torch.cat([x[order], new], dim=1), attention_mask=whole)[:, first:]
    got = with_cache(case, built, [x, new], mask, order)[:, first:]
    case.close(
        got, expected, "after a reordering the cache goes on with the wrong past",
        asks=None if mask is None else ("reorders_mask", False),
        cause=lambda: beam_cause(case, built, mask),
    )  # fmt: skip
    case.witness()


@holds(
    "decoding.probability",
    statement="The probabilities of all continuations of a token sum to one.",
    formula="sum over all x_1..x_n of prod_t p(x_t | x_0..x_t-1) = 1",
    source="The chain rule; a model that sees ahead breaks it.",
    kinds=_KIND,
    level="extended",
    unless=excludes_fact("prefix"),
    examples_factor=0.25,
    catches=("CM01",),
)
def all_continuations_sum_to_one(case: Case) -> None:
    """Over all V^n continuations, n = 2 for the drawn vocabularies and 4 where V = 3 can be built: the factors are
    conditional probabilities only if each sees its past alone. The model takes no part in the normalisation.
    """
    subject, config = case.subject, case.config()
    if subject.build is not None and 3 in subject.domain.get("vocab_size", (3,)):
        config = replace(config, vocab_size=3)
    built = case.bench.pool.fresh(config, case.dtype())
    vocabulary = config.vocab_size
    steps = next((n for n in (4, 3, 2) if vocabulary**n <= 600 and case.fitting(n + 1) == n + 1), 0)
    if not steps:
        case.does_not_apply(f"a vocabulary of {vocabulary} has too many continuations of its lengths to sum over")
    words = torch.cartesian_prod(*[torch.arange(vocabulary)] * steps).to(case.bench.device)
    first = torch.full((len(words), 1), case.integer("first", 0, vocabulary - 1), device=words.device)
    with torch.no_grad():
        logits = case.call(built, torch.cat([first, words], dim=1))
    if logits.shape[-1] != vocabulary:
        case.does_not_apply("its outputs are no logits over the vocabulary")
    log_p = logits[:, :-1].double().log_softmax(-1).gather(-1, words[..., None]).sum(dim=(1, 2))
    total = log_p.exp().sum()
    bound = 4 * steps * tolerance_of(case.bench, case.built(dtype=built.dtype)) * max(1.0, size_of(logits))
    case.close(total, torch.ones_like(total), "the probabilities of all continuations do not sum to one", bound=bound,
               constants_allowed=True, cause=lambda: leak_of(case, case.built(dtype=built.dtype)))  # fmt: skip
    case.witness()
