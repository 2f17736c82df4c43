"""New weights in a model that was called before: what it made of the old ones must not outlive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.registered import made_at_a_call
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.inputs import Inputs
from veriformer.properties.subject.paths import Path

_MODES = ("no_grad", "grad")
"""Where no gradient is asked for, matrices are joined, folded and kept; inference mode takes the same branches."""


def new_weights_are_taken(
    case: Case,
    built: Built,
    module: nn.Module,
    inputs: Inputs,
    fresh: Callable[[], nn.Module],
    load: Callable[[nn.Module, nn.Module], None],
) -> None:
    """Require that a model computes by the weights that are loaded into it after a call.

    Args:
        case: of `parameters.registered`.
        built: what holds the module.
        module: whose weights are loaded.
        inputs: that it is called with.
        fresh: makes a module of the same sizes with other weights.
        load: loads the weights of the second module into the first.
    """
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    for mode in _MODES:
        path = Path(mode=mode)

        def called(module: nn.Module, path: Path = path, given: Sequence[Tensor] = tensors) -> Tensor:
            return case.call(replace(built, module=module.eval()), *given, *inputs.extras, path=path).detach().clone()

        def cause(other: nn.Module, called: Callable[..., Tensor] = called) -> str | None:
            told = made_at_a_call(other, fresh())
            if told is None:
                return None
            with off_the_record(case):
                used, unused = fresh(), fresh()
                for one in (used, unused):
                    load(one, module)
                called(used, given=[x.flip(tuple(range(min(x.ndim, 2)))) for x in tensors])
                if torch.equal(called(used), called(unused)):
                    return told
            name = told.partition(" ")[0]
            return f"{name} was made of the first inputs, and is used again for others of their shape"

        other = fresh()
        called(other)
        case.apply(load, other, module)
        case.close(
            called(other), called(module),
            f"in mode {mode} new weights, loaded after a call, do not give what they give elsewhere",
            constants_allowed=True, cause=lambda other=other, cause=cause: cause(other),  # type: ignore[misc]
        )  # fmt: skip
