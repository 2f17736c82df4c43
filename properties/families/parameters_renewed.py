"""New weights in a model that was called before: what it made of the old ones must not outlive them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.registered import made_at_a_call
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

        def called(module: nn.Module, path: Path = path) -> Tensor:
            return case.call(replace(built, module=module.eval()), *tensors, *inputs.extras, path=path).detach().clone()

        other = fresh()
        called(other)
        case.apply(load, other, module)
        case.close(
            called(other), called(module),
            f"in mode {mode} new weights, loaded after a call, do not give what they give elsewhere",
            constants_allowed=True, cause=lambda other=other: made_at_a_call(other, fresh()),  # type: ignore[misc]
        )  # fmt: skip
