"""What is measured on a subject before it is judged: its rounding noise, the dtypes it computes in, its choices.

Each is measured once and kept on the workbench.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.noise import allowance, least_tolerance, relative_tolerance, sensitivity
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.watches import ChoiceWatch, NarrowingWatch, is_widened
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.definitions.rounding import GAP, epsilon
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import KINDS

T = TypeVar("T")


def _kept(bench: Workbench, key: tuple[Any, ...], measure: Callable[[], T]) -> T:
    if key not in bench.measured:
        bench.measured[key] = measure()
    kept: T = bench.measured[key]
    return kept


def tolerance_of(bench: Workbench, built: Built, error: float | None = None) -> float:
    """Return the largest relative difference between equivalent evaluations that counts as rounding.

    Args:
        bench: of the subject.
        built: the model.
        error: that is judged: nothing is measured where it is rounding by any tolerance, and where the first inputs
            show that it is no more of them are, which could but raise the tolerance.
    """
    if error is not None and error <= least_tolerance(built.dtype):
        return least_tolerance(built.dtype)

    def measure() -> float:
        if built.dtype == torch.float64 and not computes_in_float64(bench):  # asked for: it computes in float32 inside
            return tolerance_of(bench, single_of(bench, built))
        if allowance(_first_floor(bench, built), built.dtype, longest_sum(built)) >= GAP[built.dtype]:
            return GAP[built.dtype]  # all that is allowed, whatever other inputs show
        return relative_tolerance(_floor(bench, built), built.dtype, longest_sum(built))

    is_own = built.dtype != torch.float64 or computes_in_float64(bench)
    if error is not None and is_own:
        least = relative_tolerance(_first_floor(bench, built), built.dtype, longest_sum(built))
        if error <= least:
            return least
    return _kept(bench, ("tolerance", built.config, built.dtype), measure)


def longest_sum(built: Built) -> int:
    """Return how many terms the longest of a model's sums has, as far as its sizes say."""
    c = built.config
    return max(c.d_model, c.d_ff, c.max_len, 16)


def _floor(bench: Workbench, built: Built) -> float:
    """Return how far moves by one unit in the last place move the output."""

    def measure() -> float:
        floor = _first_floor(bench, built)
        if varies(bench, built):
            more = range(2, 4 if bench.pool.is_large else 6)
            floor = max(floor, *(_sensitivity(bench, built, epsilon(built.dtype), seed) for seed in more))
        return floor

    return _kept(bench, ("floor", built.config, built.dtype), measure)


def varies(bench: Workbench, built: Built) -> bool:
    """Whether a model amplifies rounding so much that by how much varies from input to input."""
    single = torch.float32
    floor = _first_floor(bench, built) / epsilon(built.dtype) * epsilon(single)
    return allowance(floor, single, longest_sum(built)) > GAP[single]


def _first_floor(bench: Workbench, built: Built) -> float:
    """Return how far such moves move the output on the first inputs: `_floor` is no less."""
    key = ("first floor", built.config, built.dtype)
    return _kept(bench, key, lambda: _sensitivity(bench, built, epsilon(built.dtype)))


def is_swamped(bench: Workbench, built: Built) -> bool:
    """Whether rounding alone may move the output further than `GAP`, and float64 is there to judge in instead.

    Twelve layers with sharp softmaxes amplify a thousandfold: no difference in float32 says anything then. In half
    precision most models come near the cap with their allowance; there the plain move by one unit must pass it.
    """
    if built.dtype == torch.float64:
        return False
    largest = GAP[built.dtype]
    moves = _rounding(bench, built, _first_floor) > largest or rounding_of(bench, built) > largest
    return moves and computes_in_float64(bench)


def rounding_of(bench: Workbench, built: Built) -> float:
    """Return how far rounding may move the output, relative to its size, however far that is; 0 if it refuses."""
    return _rounding(bench, built, _floor)


def _rounding(bench: Workbench, built: Built, measured: Callable[[Workbench, Built], float]) -> float:
    try:
        floor = measured(bench, built)
    except SubjectError:  # it refuses the dtype
        return 0.0
    is_half = built.dtype in (torch.bfloat16, torch.float16)
    return floor if is_half else allowance(floor, built.dtype, longest_sum(built))


def single_of(bench: Workbench, built: Built) -> Built:
    """Return the same model in float32."""
    return bench.pool.get(built.config, torch.float32, raw=built.is_raw)


def closed_form_tolerance(bench: Workbench, built: Built, *, autocast: str = "") -> float:
    """Return the relative difference from a closed form that no bound derived from dtypes alone can know of.

    A constant that was made in float32 (a table, `torch.sqrt(torch.FloatTensor([d]))`) is wrong by up to u of float32
    in float64 too: as if the data that it enters with were moved by as much, so that the tolerance of the float32 model
    holds, whose data are moved by 2 u. Under autocast products are made in its dtype, whatever comes out.
    """
    if autocast:
        return half_tolerance_of(bench, built, getattr(torch, autocast))
    if built.dtype == torch.float64 and has_narrow_constants(bench, built):
        return tolerance_of(bench, single_of(bench, built))
    return 0.0


def has_narrow_constants(bench: Workbench, built: Built) -> bool:
    """Whether in a float64 model numbers that were rounded to float32 take part: made in the forward, or buffers.

    Asked at every size: the root of 4 is exact, that of 5 is not.
    """
    return _kept(bench, ("narrow constants", built.config), lambda: _has_narrow_constants(bench, built))


def _has_narrow_constants(bench: Workbench, built: Built) -> bool:
    if _keeps_narrow_constants(built.module):
        return True
    if not has_ordinary_inputs(bench.subject.kind):
        return False
    inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(1), built.dtype)
    try:
        with NarrowingWatch() as watch, torch.no_grad():
            bench.forward(built, *[x.to(bench.device) for x in inputs.tensors], *inputs.extras)
    except SubjectError:
        return False
    return watch.has_narrow_constants


def _keeps_narrow_constants(module: object) -> bool:
    """Whether buffers and frozen parameters of a float64 model hold float32 numbers."""
    if not isinstance(module, torch.nn.Module):
        return False
    fixed = (*module.buffers(), *(p for p in module.parameters() if not p.requires_grad))
    return any(is_widened(value) for value in fixed if value.dtype == torch.float64 and value.numel())


def half_tolerance_of(bench: Workbench, built: Built, dtype: torch.dtype) -> float:
    """Return the tolerance under autocast, which computes parts in half precision and others in float32.

    Which parts these are depends on the path (a kernel with or without a mask), so that a whole path is rounded
    otherwise, not single tensors: three times what the model shows in that dtype, at most `GAP`.
    """
    try:
        return min(3 * tolerance_of(bench, bench.pool.get(built.config, dtype)), GAP[dtype])
    except SubjectError:
        return GAP[dtype]


def _sensitivity(bench: Workbench, built: Built, step: float, seed: int = 1) -> float:
    generator = torch.Generator().manual_seed(seed)
    inputs = ordinary(bench.subject, built.config, generator, built.dtype)
    tensors = [x.to(bench.device) for x in inputs.tensors]

    def call(module: Any, moved: list[Tensor]) -> Tensor:
        stand_in = Built(module, built.config, built.dtype, built.is_fresh)
        return bench.forward(stand_in, *moved, *inputs.extras)

    return sensitivity(built.module, call, tensors, built.dtype, generator, step, is_ours=built.is_fresh)


def judged_dtypes(bench: Workbench) -> tuple[torch.dtype, ...]:
    """Return the dtypes to judge in: those asked for, else float32 and, where it is genuine, float64."""
    if bench.settings.dtypes:
        return bench.settings.dtypes
    own = given_dtype(bench)
    if own == torch.float64:
        return (own,)
    if bench.spares_float64:
        return (own,) if own == torch.float32 else (own, torch.float32)
    return (own, torch.float64) if computes_in_float64(bench) else (own,)


def judges_in_float64(bench: Workbench) -> bool:
    """Whether float64 is judged in and genuine: it can be asked for where the subject computes in float32 inside."""
    asked = bench.settings.dtypes
    return (not asked or torch.float64 in asked) and computes_in_float64(bench)


def given_dtype(bench: Workbench) -> torch.dtype:
    """Return the parameter dtype of a ready-made instance, float32 for anything else."""
    module = bench.subject.module
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)


def computes_in_float64(bench: Workbench) -> bool:
    """Whether the subject genuinely computes in float64, so that it can be judged there."""
    return _kept(bench, ("float64",), lambda: _computes_in_float64(bench))


def computes_alike(bench: Workbench, like: Workbench) -> None:
    """Judge a subject in the dtypes of another one that it was made of: changing a `forward` narrows no arithmetic.

    Of a large instance all that was measured is taken over: each of it costs as much as the search for one fault. So
    is what a violation asks for, which nothing but faults may have asked for yet.
    """
    if like.pool.is_large:
        for config in like.configs:
            rounding_of(like, like.pool.get(config, torch.float32))
        bench.measured |= like.measured
    else:
        bench.measured["float64",] = computes_in_float64(like)


def _computes_in_float64(bench: Workbench) -> bool:
    """Probe: no operation gives narrower numbers, and the output follows a move of 1e-11."""
    if bench.device.type == "mps" or not has_ordinary_inputs(bench.subject.kind):
        return False
    try:
        built = bench.pool.get(bench.configs[0], torch.float64)
        inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(1), torch.float64)
        tensors = [x.to(bench.device) for x in inputs.tensors]
        with NarrowingWatch() as watch, torch.no_grad():
            output = bench.forward(built, *tensors, *inputs.extras)
            for backend in bench.subject.backends.values():  # they must agree with the default one
                with backend():
                    bench.forward(built, *tensors, *inputs.extras)
        hidden = built.module.modules() if isinstance(built.module, torch.nn.Module) else ()
        if any(getattr(part, "is_narrow", False) for part in hidden):  # other frameworks, which torch cannot watch
            return False
        if watch.is_narrow or output.dtype != torch.float64 or not bool(output.isfinite().all()):
            return False
        floats = built.module is not None or any(x.is_floating_point() for x in inputs.tensors)
        step = 1e-11  # far below float32's 6e-8, far above float64's 1e-16
        moved = _sensitivity(bench, built, step)
    except SubjectError:
        return False
    if not floats or moved <= step * 1e-3:
        return not floats
    # many sharp layers amplify more than a thousandfold: then the output follows a hundredfold move a hundredfold,
    # where roundings of float32 are of one size, however many there are
    return moved < step * 1e3 or 30 * moved < _sensitivity(bench, built, 100 * step)


def makes_choices(bench: Workbench, built: Built) -> bool:
    """Whether the model picks by numbers that it computed (experts, keys): half precision flips such picks."""
    return _kept(bench, ("choices", built.config), lambda: _makes_choices(bench, built))


def _makes_choices(bench: Workbench, built: Built) -> bool:
    inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(1), built.dtype)
    try:
        with ChoiceWatch() as watch, torch.no_grad():
            bench.forward(built, *[x.to(bench.device) for x in inputs.tensors], *inputs.extras)
    except SubjectError:
        return False
    return watch.has_chosen


def takes_ignored_labels(bench: Workbench, built: Built) -> bool:
    """Whether a loss can be given labels that are not counted: declared, or seen to be taken.

    One that gathers the label's logit raises at -100 by right where nobody said that there are such labels.
    """
    if bench.subject.fact("ignore_index") is not None:
        return True
    return _kept(bench, ("ignored labels", built.config), lambda: _takes_ignored_labels(bench, built))


def _takes_ignored_labels(bench: Workbench, built: Built) -> bool:
    logits = torch.zeros(1, 3, built.config.vocab_size, dtype=built.dtype)
    try:
        with bench.trying(built) as tried:
            bench.forward(tried, logits, torch.tensor([[0, -100, 1]]))
    except SubjectError:
        return False
    return True


def is_deterministic_in_training(bench: Workbench, built: Built) -> bool:
    """Whether train mode, without dropout, can be judged like eval mode: equal calls agree.

    On many copies of a batch: stochastic depth draws once a sample, and two samples would often agree by chance.
    """
    first = bench.configs[0]
    if built.config not in bench.configs and built.config.dropout == first.dropout:
        built = bench.pool.get(first, built.dtype)  # nothing is drawn by size; and the copies cost little there
    key = ("training", built.config, built.dtype)
    return _kept(bench, key, lambda: _is_deterministic_in_training(bench, built))


def _is_deterministic_in_training(bench: Workbench, built: Built) -> bool:
    inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(1), built.dtype)
    copies = (16 if bench.pool.is_large else 64) if KINDS[bench.subject.kind].inputs != "other" else 1
    tensors = [x.repeat(copies, *(1,) * (x.ndim - 1)).to(bench.device) for x in inputs.tensors]
    if not isinstance(built.module, torch.nn.Module):
        return False
    built.module.train()
    try:
        return agrees_with_itself(bench, built, *tensors, *inputs.extras)
    except SubjectError:
        return False
    finally:
        built.module.eval()


def gives_no_gradients(bench: Workbench) -> bool:
    """Whether a model with parameters to train gives outputs without a graph: inference_mode, no_grad, detach."""
    return _kept(bench, ("gives no gradients",), lambda: _gives_no_gradients(bench))


def _gives_no_gradients(bench: Workbench) -> bool:
    if not has_ordinary_inputs(bench.subject.kind):
        return False
    built = bench.pool.get(bench.configs[0], given_dtype(bench))
    if not isinstance(built.module, nn.Module) or not any(p.requires_grad for p in built.module.parameters()):
        return False
    inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(1), built.dtype)
    try:
        with torch.enable_grad():
            output = bench.forward(built, *(x.to(bench.device) for x in inputs.tensors), *inputs.extras)
    except SubjectError:
        return False
    return not output.requires_grad


def agrees_with_itself(bench: Workbench, built: Built, *inputs: Any) -> bool:
    """Whether two equal calls give the same output within rounding."""
    first, second = (bench.forward(built, *inputs) for _ in range(2))
    return worst_difference(first, second, size_of(second)).error <= 16 * epsilon(first.dtype)


def mask_axes(bench: Workbench) -> int:
    """Return how a mask of kind attention looks: 4 `[B, 1, T, S]`, 3 `[B, T, S]`, 2 `[T, S]`, 1 `[B, S]`.

    The last where padding is the only mask that the subject takes; the others are tried one after another on sizes that
    all differ, with fewer queries than keys and with more: what indexes another axis than it means to may run on one.
    4 where none of them works, so that what it raises is seen.
    """
    return _kept(bench, ("mask axes",), lambda: _mask_axes(bench))


def _mask_axes(bench: Workbench) -> int:
    if bench.subject.takes_mask("padding") and not bench.subject.takes_mask("pairwise"):
        return 1
    return max(_axes_that_run(bench, 4, 3, 2) or {4})


def takes_padding_alone(bench: Workbench) -> bool:
    """Whether a kernel that says nothing of its masks takes `[B, S]`, and none of the shapes of pairwise ones."""
    if bench.subject.kind != "attention" or bench.subject.mask_forms is not None:
        return False
    if not bench.subject.takes_mask("pairwise"):
        return False
    return not _axes_that_run(bench, 4, 3, 2) and bool(_axes_that_run(bench, 1))


def _axes_that_run(bench: Workbench, *axes: int) -> set[int]:
    runs = [{n for n in axes if _runs_with(bench, n, *lengths)} for lengths in ((4, 5), (5, 3))]
    return runs[0] & runs[1] or runs[0]


def _runs_with(bench: Workbench, axes: int, queries: int, keys: int) -> bool:
    built = bench.pool.get(bench.configs[0], torch.float32)
    q, k = (torch.zeros(2, 3, n, 8, device=bench.device) for n in (queries, keys))
    allow = torch.ones(2, 1, queries, keys, dtype=torch.bool, device=bench.device)
    mask = {4: allow, 3: allow[:, 0], 2: allow[0, 0], 1: allow[:, 0, 0]}[axes]
    try:
        return bool(bench.forward(built, q, k, k, attention_mask=mask).shape == q.shape)
    except SubjectError:
        return False
