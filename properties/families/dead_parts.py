"""Parts of a matrix, and whole tables, that no output depends on; part of `parameters.all-used`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.inputs import Inputs, ordinary

_MAPS = (nn.Linear, nn.MultiheadAttention)


def parts_count(case: Case, built: Built, inputs: Inputs, output: Tensor, gradients: Sequence[Tensor | None]) -> None:
    """Fail where the output depends on a part of a matrix alone, or not on what stands in a table.

    Args:
        case: that judges.
        built: the model.
        inputs: that it was called on.
        output: what it gave.
        gradients: of its trained parameters, in their order.
    """
    named = [(name, p) for name, p in built.module.named_parameters() if p.requires_grad]
    maps = {id(p) for m in built.module.modules() if isinstance(m, _MAPS) for p in m.parameters(recurse=False)}
    suspects = [
        (n, p)
        for (n, p), g in zip(named, gradients, strict=True)
        if id(p) in maps and dead_part(g, output.shape[-1], built.config.d_head)
    ]
    if suspects:
        whole_matrices_learn(case, built, suspects, output)
    tables = {id(m.weight) for m in built.module.modules() if isinstance(m, nn.Embedding)}
    for (name, p), g in zip(named, gradients, strict=True):
        if p.ndim > 1 and p.numel() and g is not None and not (g.is_sparse or g.any() or id(p) in tables):
            _counts(case, built, name, p, (0, 0, len(p), len(p)))
    if squares := [one for one, g in zip(named, gradients, strict=True) if is_a_diagonal(g)]:
        more_than_the_diagonal_learns(case, built, squares, output)
    coarse = case.subject.fact("structure") == "other"  # buckets of which few tokens reach the first alone
    for name, parameter in [] if coarse else tables_of_no_effect(built.module, named, gradients)[:3]:
        changed = moved_by(case, built, parameter, inputs, output)
        case.require(
            changed > case.tolerance(built) * size_of(output.detach()),
            f"whatever stands in {name}, the outputs are the same",
            got=f"outputs {changed:.3g} apart with other rows",
            expected="other outputs",
            asks=("structure", "other"),
            cause=lambda name=name: f"all that counts is given one row of {name}, which the softmax cancels",  # type: ignore[misc]
        )


def without_graph(case: Case, built: Built, inputs: Inputs) -> str:
    """Say why an output has no graph: there is one where an input asks for a gradient, or there is none at all."""
    with off_the_record(case), torch.enable_grad():
        given = [x.to(case.bench.device).detach() for x in inputs.tensors]
        tensors = [x.requires_grad_() if x.is_floating_point() else x for x in given]
        has_one = case.call(built, *tensors, *inputs.extras).requires_grad
    if has_one:
        return (
            "its parameters get gradients where an input asks for one alone: a checkpoint with use_reentrant=True, or "
            "an autograd.Function that is not given the parameters"
        )
    return "its forward runs under no_grad or inference_mode, or detaches what it gives"


def whole_matrices_learn(case: Case, built: Built, suspects: list[tuple[str, nn.Parameter]], output: Tensor) -> None:
    """Fail where a whole part of a matrix has no gradient, and outputs stay whatever is put there.

    Rows that a ReLU holds at zero have no gradient either: of six draws of inputs and values some let them through.
    """
    for name, parameter in suspects:
        gradient = torch.autograd.grad(output.sum(), parameter, retain_graph=True)[0]
        if part := dead_part(gradient, output.shape[-1], built.config.d_head):
            _counts(case, built, name, parameter, part)


def _counts(case: Case, built: Built, name: str, parameter: nn.Parameter, part: tuple[int, int, int, int]) -> None:
    """Require that outputs depend on a part of a parameter, or on all of it, for one of six inputs and values."""
    axis, start, size, step = part
    whole = size == parameter.shape[axis]
    words, gets = (name, "gets") if whole else (f"{_named(part, parameter.shape[axis])} of {name}", "get")
    kept, changed = parameter.detach().clone(), torch.zeros((), dtype=torch.bool, device=parameter.device)
    shape = [*kept.shape]
    shape[axis] = shape[axis] // step * size
    for times in (1.0, 1.0, 1.0, 30.0, 1e3, 3e4):  # what small weights do may be rounded away
        drawn = ordinary(case.subject, built.config, case.generator, built.dtype)
        call = case.caller(built, *[x.to(case.bench.device) for x in drawn.tensors], *drawn.extras)
        values = case.normal(*shape, dtype=kept.dtype) * times * (3 * size_of(kept) or 1.0)
        changed = changed | case.apply(changes, call, parameter, axis, start, size, step, values)
    if not bool(changed) and (name in given_nothing(case, built) or (whole and _learns_as_built(case, built, name))):
        return
    case.require(
        changed,
        f"{words} never {gets} a gradient: the output does not depend on {'it' if whole else 'them'}",
        got=f"the same outputs for six other values of {'it' if whole else 'them'}",
        expected="a part of the output",
        cause=lambda: f"{words} {'is' if whole else 'are'} computed and not used, or cut off",
    )


def _learns_as_built(case: Case, built: Built, name: str) -> bool:
    """Whether a parameter has a gradient in a model with its own initial weights, as experts have that are chosen.

    With weights that are drawn anew a router may give one expert nothing, whatever the token.
    """
    if not built.is_fresh:
        return False
    with off_the_record(case):
        raw = case.bench.pool.get(built.config, built.dtype, raw=True)
        parameter = dict(raw.module.named_parameters()).get(name)
        if parameter is None:
            return False
        for _ in range(3):
            drawn = ordinary(case.subject, raw.config, case.generator, raw.dtype)
            output = case.call(raw, *[x.to(case.bench.device) for x in drawn.tensors], *drawn.extras)
            if not output.requires_grad:
                return False
            weight = case.normal(*output.shape, dtype=output.dtype)
            (gradient,) = torch.autograd.grad((output * weight).sum(), [parameter], allow_unused=True)
            if gradient is not None and bool(gradient.any()):
                return True
    return False


def _named(part: tuple[int, int, int, int], length: int) -> str:
    """Say which rows or columns a part has."""
    axis, start, size, step = part
    first = f"{('rows', 'columns')[axis]} {start}" + (f" to {start + size - 1}" if size > 1 else "")
    return first if step >= length else f"{first}, {start + step} and so on ({length // step * size} of {length})"


def more_than_the_diagonal_learns(
    case: Case, built: Built, squares: list[tuple[str, nn.Parameter]], output: Tensor
) -> None:
    """Fail where of a square matrix the diagonal alone has a gradient, and outputs stay whatever is put beside it."""
    for name, parameter in squares:
        changed = torch.zeros((), dtype=torch.bool, device=output.device)
        beside = ~torch.eye(len(parameter), dtype=torch.bool, device=parameter.device)
        for _ in range(3):
            drawn = ordinary(case.subject, built.config, case.generator, built.dtype)
            inputs = [*(x.to(case.bench.device) for x in drawn.tensors), *drawn.extras]
            values = case.normal(*parameter.shape, dtype=parameter.dtype) * (3 * size_of(parameter.detach()) or 1.0)
            other = torch.where(beside, values, parameter.detach())
            call, size = case.caller(built, *inputs), len(other)
            changed = changed | case.apply(changes, call, parameter, 0, 0, size, size, other)
        case.require(
            changed,
            f"of {name} the diagonal alone is used: the output does not depend on the rest of it",
            got="the same outputs for three other values beside the diagonal",
            expected="a product with the matrix",
            cause=lambda name=name: (
                f"{name} is multiplied by number for number: an einsum whose two indices of the "  # type: ignore[misc]
                "matrix have one name takes its diagonal"
            ),
        )


def is_a_diagonal(gradient: Tensor | None) -> bool:
    """Whether a gradient `[N, N]` is exactly zero beside its diagonal, and nowhere on it."""
    if gradient is None or gradient.is_sparse or gradient.ndim != 2 or gradient.shape[0] != gradient.shape[1]:
        return False
    return (
        len(gradient) > 2
        and bool(gradient.diagonal().all())
        and not bool(gradient.ne(0).triu(1).any())
        and not bool(gradient.ne(0).tril(-1).any())
    )


def given_nothing(case: Case, built: Built) -> set[str]:
    """Return the names of the parameters of parts that are given a tensor of zeros, as queries may begin."""
    if not isinstance(built.module, nn.Module):
        return set()
    own = torch.Generator(case.generator.device).manual_seed(0)
    drawn, found = ordinary(case.subject, built.config, own, built.dtype), set[str]()

    def noting(path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            if any(x.ndim > 2 and not bool(x.any()) for x in tensors):
                found.update(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))

        return note

    hooks = [m.register_forward_pre_hook(noting(path), with_kwargs=True)
             for path, m in built.module.named_modules() if path]  # fmt: skip
    try:
        with torch.no_grad():
            case.call(built, *[x.to(case.bench.device) for x in drawn.tensors], *drawn.extras)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def changes(
    call: Callable[[], Tensor], parameter: Tensor, axis: int, start: int, size: int, step: int, values: Tensor
) -> Tensor:
    """Return whether other values in a part of a parameter change what is given; it has its own again afterwards.

    Args:
        call: of the model.
        parameter: a matrix of it.
        axis: along which the part is cut out.
        start: of the part.
        size: rows or columns that stand together.
        step: from the first of some that stand together to the first of the next ones.
        values: for it.
    """
    with torch.no_grad():
        before, kept = call(), parameter.detach().clone()
        at = torch.arange(parameter.shape[axis], device=parameter.device)
        parameter.index_copy_(axis, at[(at - start) % step < size], values)
        after = call()
        parameter.copy_(kept)
    return (after != before).any()


def dead_part(gradient: Tensor | None, columns: int, of_a_head: int) -> tuple[int, int, int, int] | None:
    """Return a half, third or quarter of a matrix whose gradient is exactly zero: axis, start, size and step.

    Or channels of all heads: the last of an odd number, say, where the others are turned in pairs.

    It stands together, or is every second (third, fourth) row or group of rows: as gates and values may lie, or the
    queries, keys and values of one head behind those of another. Rows behind the columns of the output are those of a
    padded vocabulary.
    """
    if gradient is None or gradient.ndim != 2 or gradient.is_sparse or not gradient.any():
        return None
    for axis in (0, 1):
        alive = gradient.ne(0).any(1 - axis)
        if axis == 0 and len(alive) > columns and bool(alive[:columns].all()) and not alive[columns:].any():
            continue
        for parts in (2, 3, 4):
            whole = len(alive) // parts
            if whole < 4 or whole * parts != len(alive):
                continue
            for size in (n for n in range(whole, 0, -1) if whole % n == 0):
                dead = (~alive.view(-1, parts, size).any(2).any(0)).nonzero()
                if len(dead):
                    return axis, int(dead[0]) * size, size, parts * size
        for step in (of_a_head, 3 * of_a_head):  # queries, keys and values of a head may stand side by side
            count, rest = divmod(len(alive), max(step, 1))
            if of_a_head < 3 or rest or count < 2:
                continue
            dead = (~alive.view(count, step).any(0)).nonzero().flatten()
            only = int((~alive).sum()) == count * len(dead)  # units that a ReLU holds at zero may lie so by chance
            if only and 0 < len(dead) < step and int(dead[-1] - dead[0]) == len(dead) - 1:
                return axis, int(dead[0]), len(dead), step
    return None


def moved_by(case: Case, built: Built, parameter: nn.Parameter, inputs: Inputs, output: Tensor) -> Tensor:
    """Return how far outputs move when a parameter has other values; it has its own again afterwards."""
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.copy_(case.normal(*kept.shape, dtype=kept.dtype) * (size_of(kept) or 1.0))
        moved = case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
        parameter.copy_(kept)
    return (moved - output).detach().abs().max()


def tables_of_no_effect(
    module: nn.Module, named: list[tuple[str, nn.Parameter]], gradients: Sequence[Tensor | None]
) -> list[tuple[str, nn.Parameter]]:
    """Return the tables that rows are looked up in whose gradients are rounding beside those of other parameters.

    A bias on scores that is the same for all keys that count leaves a softmax as it is.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    largest = max((float(g.abs().max()) for g in gradients if g is not None and g.numel()), default=0.0)
    return [
        (name, p)
        for (name, p), g in zip(named, gradients, strict=True)
        if id(p) in tables and g is not None and not g.is_sparse and g.any() and float(g.abs().max()) < 1e-5 * largest
    ]
