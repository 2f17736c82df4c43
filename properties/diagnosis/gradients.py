"""What is wrong with a gradient that is not the derivative: what cuts it, which term is missing, where, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.diagnosis.differentiating import Setting, Sizes, factor_in_words, setting
from veriformer.properties.diagnosis.gradient_formulas import told_by_formula
from veriformer.properties.diagnosis.gradient_parts import kept_from_an_earlier_call, wrong_part
from veriformer.properties.diagnosis.graph_cuts import Cut, CutWatch, decisive_cut
from veriformer.properties.diagnosis.own_backwards import wrong_backward
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation

_GRADIENT = ("gradient", "Jacobian", "derivative")


def gradient_opinion(case: Case, problem: Violation) -> str | None:
    """Explain a failure that speaks of a gradient."""
    return wrong_gradient(case) if any(word in problem.headline for word in _GRADIENT) else None


def wrong_gradient(case: Case, rate: float = 0.0) -> str | None:
    """Say what is wrong with the gradients of a subject; None where nothing is, or nothing is known.

    Args:
        case: of the failure; the model has its sizes.
        rate: of dropout in train mode; 0: eval mode.
    """
    try:
        with off_the_record(case):
            return _wrong_gradient(case, rate)
    except Exception:  # whatever goes wrong here must not hide the violation itself
        if os.environ.get("W1_DEBUG"):
            raise
        return None


def _wrong_gradient(case: Case, rate: float) -> str | None:
    if not rate and (told := kept_from_an_earlier_call(case)):
        return told
    for sizes, condition in _situations(case, rate):
        try:
            made = setting(case, sizes)
            is_wrong = not made.is_right()
        except Exception:  # it refuses these sizes
            continue
        if is_wrong:
            return _told(case, made, sizes, condition or _narrowed(case, sizes))
    return None


def _situations(case: Case, rate: float) -> Iterator[tuple[Sizes, str]]:
    """Yield what to call a subject on, the plainest first, and what each has that those before had not."""
    kind = case.subject.kind
    plain = Sizes(batch=2, queries=5, keys=7, heads=3, rate=rate)
    if kind != "attention":
        longest = min(case.subject.fact("max_len", 64), case.config().max_len)
        yield replace(plain, queries=min(5, longest), keys=min(7, longest)), ""
        if longest >= 17:
            yield replace(plain, queries=17, keys=17), "wrong for long sequences only: right at 5 positions, wrong at 17"
        if case.subject.takes_mask("padding") and kind not in ("encoder_decoder",):
            yield replace(plain, mask="mask"), "wrong with a mask, right without"
        if kind == "encoder_decoder" and case.subject.accepts("source_mask"):
            yield replace(plain, mask="mask"), "wrong with a mask, right without"
        return
    yield plain, ""
    yield replace(plain, queries=17, keys=19), ""
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
    right = [_is_right(case, replace(sizes, **{name: n})) for n in range(low, high + 1)]
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
    own = _own_backward(made)
    by = f"the backward of {own[0]}, written by hand," if own else ""
    if own and sizes.rate:
        return f"{by} drops others than the forward did: without dropout it is right{when}"
    doubled = made.gradients(2.0)
    if all(_equal(doubled[name], gradients[name]) for name in wrong):
        return (
            f"{by or 'the backward'} does not multiply by the gradient that comes in: twice that gives the same{when}"
        )
    part = None if own else wrong_part(case, made)
    told = _by_leaf(case, made, sizes, wrong, gradients)
    if not told and part is not None:
        return f"{part}{when}"
    if not told and not own:
        return None
    what = "; ".join(f"the gradient of {_names(names)}: {words}" for words, names in told.items())
    if own and not told:
        what = f"{by} does not give the derivative by {own[1] or _names(wrong)}"
    right = [name for name in list(made.leaves)[: made.inputs] if name not in wrong]
    rest = f"; that of {_names(right)} is right" if right else ""
    place = f"; {part}" if part else ""
    where = f" (in the backward of {own[0]}, written by hand)" if own and told else ""
    return f"{what}{where}{rest}{place}{when}"


def _names_in(made: Setting, names: list[str]) -> str:
    """Name leaves, the parts of a model all of whose parameters are among them as one."""
    if not isinstance(made.built.module, nn.Module):
        return _names(names)
    whole, rest = [], list(names)
    for part, module in made.built.module.named_modules():
        own = [f"{part}.{n}" for n, _ in module.named_parameters()]
        if part and len(own) > 1 and all(n in rest for n in own):
            whole.append(f"{part} ({type(module).__name__})")
            rest = [n for n in rest if n not in own]
    return _names(rest + whole)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if more or len(names) != 2 else " and ".join(names)


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    return one is not None and two is not None and bool(two.any()) and torch.equal(one, two)


def _cut(case: Case, made: Setting, wrong: list[str]) -> str | None:
    """Name what cuts the graph: that without which the gradient is right."""

    def is_right(undone: frozenset[Cut]) -> bool:
        with CutWatch(undone):
            gradients = made.gradients()
        return made.is_right(None, gradients)

    cut = decisive_cut(is_right)
    if cut is None:
        return None
    gradients = made.gradients()
    cut_off = [n for n, g in gradients.items() if g is None or (n in wrong and not g.any())]
    if cut.what == "a hook on the gradient":
        return f"{cut} changes the gradient of {_names(wrong)} on its way back: without it the gradient is right"
    lost = f"a part of the gradient of {_names_in(made, wrong)} is lost"
    reach = f"no gradient reaches {_names_in(made, cut_off)}" if cut_off else lost
    does = "switches gradients off" if cut.what == "no_grad" else "cuts the graph"
    missing = next((told for name in wrong[: made.inputs] if (told := _missing(case, made, name, gradients))), "")
    return f"{cut} {does}, so that {reach}: without it the gradient is right{missing}"


def _missing(case: Case, made: Setting, name: str, gradients: dict[str, Tensor | None]) -> str:
    """Say which term a cut takes from a gradient, where it is of a formula that is known."""
    gradient = gradients[name]
    told = None if gradient is None else told_by_formula(case, made, name, gradient)
    return f"; {told}" if told else ""


def _own_backward(made: Setting) -> tuple[str, str] | None:
    """Name the one backward written by hand that is wrong, and for what."""
    try:
        found = wrong_backward(made.run)
    except Exception:
        return None
    if found is None:
        return None
    applied, places = found
    return applied.name, ", ".join(f"argument {place} of its forward" for place in places)


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


def _factor(
    case: Case, made: Setting, sizes: Sizes, name: str, gradients: dict[str, Tensor | None]
) -> str | None:
    """Name the factor by which a gradient differs from the derivative, from two settings of other sizes."""
    here = made.ratio(name, gradients)
    if here is None:
        return None
    other = _of_other_sizes(case, sizes)
    there = other.ratio(name) if other is not None and name in other.leaves else None
    if other is None or there is None:
        return f"it is {here:.4g} times the derivative"
    if abs(here - there) <= 1e-4 * abs(here):
        return "it has the wrong sign" if abs(here + 1) < 1e-4 else f"it is {here:.4g} times the derivative"
    form = factor_in_words((here, made.numbers), (there, other.numbers))
    if form is None:
        return f"it is a multiple of the derivative that depends on the sizes ({here:.4g} and {there:.4g} times it)"
    measured = f"{here:.4g} and {there:.4g} times it at two sizes"
    scale = case.subject.kind == "attention" and "d_head" in form
    missing = {"sqrt(d_head)": "the scale 1 / sqrt(d_head) is missing", "1 / sqrt(d_head)": "the scale is there twice"}
    meant = f"{missing[form]}: " if scale and form in missing else ""
    return f"{meant}it is {form} times the derivative ({measured})"


def _of_other_sizes(case: Case, sizes: Sizes) -> Setting | None:
    """Return a setting whose every size is another, as far as the subject has them."""
    configs = case.bench.configs
    own = configs.index(case.config()) if case.config() in configs else 0
    grown = {"heads": 4, "groups": 2} if sizes.groups and sizes.heads // sizes.groups != 2 else {"heads": 2}
    limit = min(c.max_len for c in configs)
    longer = min(sizes.queries + 1, limit)
    other = replace(
        sizes, batch=3, queries=longer, keys=longer if sizes.queries == sizes.keys else sizes.keys + 2,
        width=16, rate=sizes.rate / 2, config=(own + 1) % len(configs), **grown,
    )  # fmt: skip
    try:
        return setting(case, other)
    except Exception:
        return None
