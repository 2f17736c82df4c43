"""What is wrong with a gradient that is not the derivative: what cuts it, which term is missing, where, and when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.properties.bench.measured import judges_in_float64
from veriformer.properties.causes.asking import answer_to, measured_once
from veriformer.properties.causes.quantising import rounds_its_numbers
from veriformer.properties.diagnosis.derivatives.differentiating import Setting, Sizes, setting
from veriformer.properties.diagnosis.derivatives.gradient_formulas import output_is_right, told_by_formula
from veriformer.properties.diagnosis.derivatives.gradient_functions import argument_names, factor_told, told_of_function
from veriformer.properties.diagnosis.derivatives.gradient_parts import (
    computed_again,
    kept_from_an_earlier_call,
    wrong_part,
)
from veriformer.properties.diagnosis.derivatives.graph_cuts import HOOK, Cut, CutWatch, decisive_cuts
from veriformer.properties.diagnosis.derivatives.own_backwards import (
    Applied,
    applied_functions,
    overwritten_gradient,
    wrong_backward,
)
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation

_GRADIENT = ("gradient", "Jacobian", "derivative")


def gradient_opinion(case: Case, problem: Violation) -> str | None:
    """Explain a failure that speaks of a gradient."""
    if not any(word in problem.headline for word in _GRADIENT):
        return None
    made = setting(case, Sizes())
    return None if rounds_its_numbers(made.built, made.run) else wrong_gradient(case)


def wrong_gradient(case: Case, rate: float = 0.0) -> str | None:
    """Say what is wrong with the gradients of a subject; None where nothing is, or nothing is known.

    Args:
        case: of the failure; the model has its sizes.
        rate: of dropout in train mode; 0: eval mode.
    """
    name = ("wrong gradient", case.config(), rate)
    return answer_to(lambda: measured_once(case, name, lambda: _wrong_gradient(case, rate)))


def _wrong_gradient(case: Case, rate: float) -> str | None:
    if case.subject.fact("quantised") or not judges_in_float64(case.bench):
        return None
    if not rate and (told := kept_from_an_earlier_call(case)):
        return told
    for sizes, condition in _situations(case, rate):
        try:
            made = setting(case, sizes)
            is_wrong = not made.is_right()
        except Exception:  # it refuses these sizes
            continue
        if is_wrong:
            if not output_is_right(case, made):
                return None  # what is wrong is the output: a right backward is not its derivative
            overwritten = answer_to(lambda: overwritten_gradient(made.run))  # noqa: B023 - called here alone
            return overwritten or _told(case, made, sizes, condition or _narrowed(case, sizes))
    return None


def _situations(case: Case, rate: float) -> Iterator[tuple[Sizes, str]]:
    """Yield what to call a subject on, the plainest first, and what each has that those before had not."""
    kind = case.subject.kind
    plain = Sizes(batch=2 if kind == "attention" else 3, queries=5, keys=7, heads=3, rate=rate)
    if kind != "attention":
        longest = min(case.subject.fact("max_len", 64), case.config().max_len)
        yield replace(plain, queries=min(5, longest), keys=min(7, longest)), ""
        if longest >= 17:
            yield replace(plain, queries=17, keys=17), ""
        masked = (
            case.subject.accepts("source_mask") if kind == "encoder_decoder" else case.subject.takes_mask("padding")
        )
        if masked:
            yield replace(plain, mask="mask"), "wrong with a mask, right without"
        if kind == "loss" and not case.subject.fact("shifts_labels"):
            yield replace(plain, mask="ignored"), "wrong where labels are ignored, else right"
        return
    yield plain, ""
    yield replace(plain, queries=17, keys=19), ""
    yield replace(plain, queries=33, keys=35), ""
    if case.subject.takes_mask("pairwise") or case.subject.takes_mask("padding"):
        yield replace(plain, mask="mask"), "wrong with a mask, right without"
    if case.subject.accepts("causal"):
        yield replace(plain, queries=5, keys=5, mask="causal"), "wrong with causal=True, right without"
        yield replace(plain, mask="causal"), "wrong with causal=True where T and S differ, else right"
    if case.subject.fact("grouped_queries"):
        grouped = "wrong with fewer key-value heads than query heads, else right"
        yield replace(plain, heads=6, groups=2), grouped


def _is_right(case: Case, sizes: Sizes) -> bool:
    return setting(case, sizes).is_right()


def _narrowed(case: Case, sizes: Sizes) -> str:
    """Say from which length on, or for which of the sizes alone, a gradient is wrong."""
    is_attention = case.subject.kind == "attention"
    try:
        if _is_right(case, replace(sizes, batch=1)):
            return "wrong for more than one sample, right for one"
        if is_attention and sizes.heads > 1 and _is_right(case, replace(sizes, heads=1)):
            return "wrong for more than one head, right for one"
        if case.subject.kind in ("attention", "cross_attention"):
            same = [replace(sizes, queries=n, keys=n) for n in (sizes.queries, sizes.keys)]
            if all(_is_right(case, s) for s in same):
                return "wrong where T and S differ, right where they are equal"
            if (first := _first_wrong(case, sizes, "keys", 2)) > 2:
                return f"right up to {first - 1} keys, wrong from {first} on"
        if (first := _first_wrong(case, sizes, "queries", 1)) > 2:
            what = "queries" if is_attention else "positions"
            return f"right up to {first - 1} {what}, wrong from {first} on"
    except Exception:  # it refuses a size: the condition stays unsaid
        return ""
    return ""


def _first_wrong(case: Case, sizes: Sizes, name: str, low: int) -> int:
    """Return the first length at which a gradient is wrong, where it stays so up to the length that is; else 0."""
    high = getattr(sizes, name)
    lengths = range(low, high + 1)
    made = [replace(sizes, queries=n) if name == "queries" else replace(sizes, keys=n) for n in lengths]
    right = [_is_right(case, one) for one in made]
    first = right.index(False)
    return low + first if not any(right[first:]) else 0


def _told(case: Case, made: Setting, sizes: Sizes, condition: str) -> str | None:
    """Say what is wrong in one setting: what cuts the graph, or what is wrong with which gradient, and where."""
    gradients = made.gradients()
    wrong = made.wrong(gradients)
    if not wrong:
        return None
    when = f"; {condition}" if condition else ""
    if cut := _cut(case, made, wrong):
        return f"{cut}{when}"
    if untrained := _padding_row(made) or computed_again(made):
        return untrained
    own = _own_backward(made)
    by = f"the backward of {own[0].name}, written by hand," if own else ""
    if own and sizes.rate:
        return f"{by} {own[0].how_it_drops(sizes.rate)}; without dropout it is right{when}"
    doubled = made.gradients(2.0)
    if all(_equal(doubled[name], gradients[name]) for name in wrong):
        what = by or "the backward"
        return f"{what} does not multiply by the gradient that comes in: twice that gives the same{when}"
    told = {} if own and case.subject.kind not in _THEMSELVES else _by_leaf(case, made, sizes, wrong, gradients)
    what = _what(told)
    if own:
        if not told:
            what = _what(told_of_function(case, made, *own, _elsewhere(case, sizes, own[0])))
        arguments = ", ".join(argument_names(own[0])[place] for place in own[1])
        where = f"in the backward of {own[0].name}, written by hand, {what}"
        what = where if what else f"{by} does not give the derivative by {arguments}"
    elif part := wrong_part(case, made):
        what = f"{part}; {what}" if what and not part.count(":") else part
    if not what:
        return None
    right = [name for name in list(made.leaves)[: made.inputs] if name not in wrong]
    rest = f"; that of {_names(right)} is right" if right and told else ""
    return f"{what}{rest}{when}"


_THEMSELVES = ("attention", "norm", "softmax", "loss", "rotary")
"""Kinds whose own formula is known: what is said of their inputs is plainer than what is said of a function inside."""


def _what(told: dict[str, list[str]]) -> str:
    return "; ".join(f"the gradient of {_names(names)}: {words}" for words, names in told.items())


def _elsewhere(case: Case, sizes: Sizes, applied: Applied) -> Applied | None:
    """Return a call of the same function at other sizes."""
    other = _of_other_sizes(case, sizes)
    if other is None:
        return None
    with applied_functions() as noted:
        other.run()
    return next((a for a in noted if a.name == applied.name), None)


def _names_in(made: Setting, names: list[str]) -> str:
    """Name leaves, the parts of a model all of whose parameters are among them as one."""
    if not isinstance(made.built.module, nn.Module):
        return _names(names)
    whole, rest = [], list(names)
    for part, module in made.built.module.named_modules():
        own = [f"{part}.{n}" for n, _ in module.named_parameters()]
        if part and len(own) > 1 and all(n in rest for n in own):
            is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
            whole.append(part if is_list else f"{part} ({type(module).__name__})")
            rest = [n for n in rest if n not in own]
    return _names(rest + whole)


def _names(names: list[str]) -> str:
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    return one is not None and two is not None and bool(two.any()) and torch.equal(one, two)


def _cut(case: Case, made: Setting, wrong: list[str]) -> str | None:
    """Name what cuts the graph: that without which the gradient is right."""

    def is_right(undone: frozenset[Cut]) -> tuple[bool, list[Cut]]:
        with CutWatch(undone) as watch:
            gradients = made.gradients()
        return made.is_right(None, gradients), watch.met

    gradients = made.gradients()
    cut_off = [n for n, g in gradients.items() if g is None or (n in wrong and not g.any())]
    cuts = decisive_cuts(is_right, not cut_off)
    if not cuts:
        return None
    told, what = " and ".join(str(cut) for cut in cuts), {cut.what for cut in cuts}
    several = len(cuts) > 1
    without = f"without {'them' if several else 'it'} the gradient is right"
    if what == {HOOK}:
        return f"{told} changes the gradient of {_names_in(made, wrong)} on its way back: {without}"
    lost = f"a part of the gradient of {_names_in(made, wrong)} is lost"
    reach = f"no gradient reaches {_names_in(made, cut_off)}" if cut_off else lost
    does = ("switch" if several else "switches") + " gradients off" if what == {"no_grad"} else "cuts the graph"
    does = "cut the graph" if several and what != {"no_grad"} else does
    missing = next((m for name in wrong[: made.inputs] if (m := _missing(case, made, name, gradients))), "")
    return f"{told} {does}, so that {reach}: {without}{missing}"


def _padding_row(made: Setting) -> str | None:
    """Name a table whose row of padding has no gradient though it is read for what is no padding."""
    module = made.built.module
    tables = [] if not isinstance(module, nn.Module) else [
        (name, part) for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) and part.padding_idx is not None
    ]  # fmt: skip
    for name, table in tables:
        row, table.padding_idx = table.padding_idx, None
        try:
            if made.is_right():
                return f"row {row} of {name}.weight is its padding_idx and gets no gradient, though it is read"
        finally:
            table.padding_idx = row
    return None


def _missing(case: Case, made: Setting, name: str, gradients: dict[str, Tensor | None]) -> str:
    """Say which term a cut takes from a gradient, where it is of a formula that is known."""
    gradient = gradients[name]
    told = None if gradient is None else told_by_formula(case, made, name, gradient)
    return f"; {told}" if told else ""


def _own_backward(made: Setting) -> tuple[Applied, list[int]] | None:
    """Return the one backward written by hand that is wrong, and for which of its arguments."""
    return answer_to(lambda: wrong_backward(made.run))


def _by_leaf(
    case: Case, made: Setting, sizes: Sizes, wrong: list[str], gradients: dict[str, Tensor | None]
) -> dict[str, list[str]]:
    """Return what is wrong in words, and the inputs and parameters that it is said of."""
    told: dict[str, list[str]] = {}
    for name in wrong[:12]:
        gradient = gradients[name]
        if gradient is None or not gradient.any():
            words: str | None = "there is none, though the output depends on it"
        else:
            words = told_by_formula(case, made, name, gradient) or _factor(case, made, sizes, name, gradients)
        if words:
            told.setdefault(words, []).append(name)
    return told


def _factor(case: Case, made: Setting, sizes: Sizes, name: str, gradients: dict[str, Tensor | None]) -> str | None:
    """Name the factor by which a gradient differs from the derivative, from two settings of other sizes."""
    here = made.ratio(name, gradients)
    if here is None or abs(here - 1) < 1e-3:  # it differs otherwise than by a factor
        return None
    other = _of_other_sizes(case, sizes)
    there = other.ratio(name) if other is not None and name in other.leaves else None
    if other is None or there is None:
        return f"it is {here:.4g} times the derivative"
    return factor_told((here, made.numbers), (there, other.numbers), case.subject.kind == "attention")


def _of_other_sizes(case: Case, sizes: Sizes) -> Setting | None:
    """Return a setting whose every size is another, as far as the subject has them."""
    configs = case.bench.configs
    own = case.config() if sizes.config is None else configs[sizes.config]

    def differs(number: int) -> tuple[bool, int, int]:
        other = configs[number]
        pairs = ((own.d_model, other.d_model), (own.num_heads, other.num_heads), (own.vocab_size, other.vocab_size))
        return own.d_head != other.d_head, sum(a != b for a, b in pairs), -number

    grouped = bool(sizes.groups) and sizes.heads // sizes.groups != 2
    limit = min(c.max_len for c in configs)
    longer = min(sizes.queries + 1, limit)
    other = replace(
        sizes, batch=5 - sizes.batch, queries=longer, keys=longer if sizes.queries == sizes.keys else sizes.keys + 2,
        width=16, rate=sizes.rate / 2, config=max(range(len(configs)), key=differs),
        heads=4 if grouped else 2, groups=2 if grouped else 0,
    )  # fmt: skip
    try:
        return setting(case, other)
    except Exception:
        return None
