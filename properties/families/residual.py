"""The residual stream: what is left when sublayers are silent, where the norm stands, what layers get."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.anatomy.norms import is_norm
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.definitions.rounding import epsilon, rounding_bound
from veriformer.properties.engine.calling import has_graph
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.residual_branches import (
    attention_stays_in_the_stream,
    raw_inputs,
    with_held_conditions,
)
from veriformer.properties.probes.module_parts import layer_lists, silence
from veriformer.properties.subject.inputs import ordinary
from veriformer.properties.subject.subject import Subject

_LAYER = ("layer",)
_HE = "He et al. 2016, equation 1; Xiong et al. 2020, figure 1."


def _declares_a_stream(subject: Subject) -> str | None:
    """Apply only where a skip is declared, or a norm's place before or behind one."""
    if subject.fact("residual") is False:
        return "it is declared to have no residual connections"
    if subject.fact("residual") or subject.fact("norm_placement") in ("pre", "post"):
        return None
    return "neither residual=True nor norm_placement is declared"


_declares_a_stream.rests_on = "norm_placement"  # type: ignore[attr-defined]


def _is_layers_alone(subject: Subject) -> str | None:
    """Apply only where nothing but layers is between what comes in and what goes out."""
    if subject.fact("final_norm"):
        return "a norm follows its layers"
    added = subject.fact("positions") in ("sinusoidal", "learned")
    return "positions are added to what it is given" if added else None


_SKIPS = (needs_module, _declares_a_stream, _is_layers_alone, excludes_fact("norm_placement", "other"))
_EPS = 1e-4
"""Largest effect of a norm's eps (up to 1e-4) on a token of unit variance."""


def _silent(case: Case) -> Built:
    """Return a copy of the layer, with gains one, whose sublayers bring nothing."""
    built = case.built(raw=True, fresh=True)
    if not isinstance(built.module, nn.Module) or not silence(built.module):
        case.does_not_apply("its sublayers hold no parameters that could be set to zero")
    return built


def _normalised(case: Case, x: Tensor) -> Tensor:
    wide = x.double()
    if case.subject.fact("norm") == "rms":
        return functional.rms_norm(wide, (x.shape[-1],), eps=1e-12)
    return functional.layer_norm(wide, (x.shape[-1],), eps=1e-12)


def _placement(case: Case, got: Tensor, x: Tensor) -> str:
    declared = case.subject.fact("norm_placement")
    if declared in ("pre", "post"):
        return str(declared)
    errors = {"pre": worst_difference(got, x).error, "post": worst_difference(got.double(), _normalised(case, x)).error}
    return min(errors, key=lambda name: errors[name])


@holds(
    "residual.identity",
    statement="With silent sublayers a pre-LN layer gives its input, a post-LN layer its normalised input.",
    formula="F = 0: pre-LN f(x) = x; post-LN f(x) = LN(LN(x)) = LN(x)",
    source=_HE,
    kinds=_LAYER,
    unless=_SKIPS,
    catches=("RS01", "RS02", "NM07"),
)
def a_silent_layer_is_the_identity(case: Case) -> None:
    """All parameters outside the norms are set to zero on a copy. LN is idempotent up to eps."""
    built = _silent(case)
    x = case.normal(2, 4, built.config.d_model, dtype=built.dtype) * case.choice("scale", (1.0, 10.0))
    got = case.call(built, x).detach()
    if _placement(case, got, x) == "pre":
        case.close(got, x, "a pre-LN layer with silent sublayers does not give its input",
                   bound=size_of(x) * 16 * rounding_bound(built.dtype, 4), constants_allowed=True,
                   cause=lambda: _stream_cause(case, got, x))  # fmt: skip
    else:
        if not any(is_norm(part) for part in built.module.modules()):
            case.does_not_apply("no module of it is known for a norm, so it is not known what to silence")
        expected = _normalised(case, x)
        case.close(got.double(), expected, "a post-LN layer with silent sublayers does not give its normalised input",
                   bound=2 * _EPS + 16 * rounding_bound(built.dtype, x.shape[-1], operations=4),
                   cause=lambda: _stream_cause(case, got, x))  # fmt: skip
        if case.subject.fact("norm_placement") == "post":  # with norms at both ends of a layer it is not known
            _norms_follow_one_another(case)
    case.witness()


def _norms_follow_one_another(case: Case) -> None:
    """With gains that differ, LN is not idempotent: the stream of a post-LN layer must pass every norm in turn."""
    built = case.built(fresh=True)
    if not isinstance(built.module, nn.Module) or not built.is_fresh or not silence(built.module):
        return
    called: list[nn.Module] = []
    norms = [m for m in built.module.modules() if is_norm(m)]
    hooks = [norm.register_forward_hook(lambda module, args, output: called.append(module)) for norm in norms]
    x = case.normal(2, 4, built.config.d_model, dtype=built.dtype)
    try:
        got = case.call(built, x).detach()
    finally:
        for hook in hooks:
            hook.remove()
    if len(called) < 2 or len({id(m) for m in called}) != len(called):
        return
    expected = x
    for norm in called:
        expected = case.bench.call(norm, expected).detach()
    case.close(got, expected, "the stream of a post-LN layer does not pass its norms one after another",
               bound=size_of(expected) * (2 * _EPS + 64 * rounding_bound(built.dtype, x.shape[-1], operations=4)),
               cause=lambda: _passed_by(case, built.module, called, x, got))  # fmt: skip


def _passed_by(case: Case, module: nn.Module, norms: list[nn.Module], x: Tensor, got: Tensor) -> str:
    """Name the norm that the stream does not pass, where without it all is right."""
    names = {part: name for name, part in module.named_modules()}
    for left_out in norms:
        stream = x
        for norm in norms:
            stream = stream if norm is left_out else case.bench.call(norm, stream).detach()
        if worst_difference(got, stream, size_of(stream)).error <= case.tolerance():
            name = names.get(left_out, "a norm")
            return (
                f"the stream does not pass {name}: the residual connection behind it adds what stood before that norm "
                "(the layer's own input, say), not what the norm gave, which goes into the next sublayer alone"
            )
    return "a residual connection starts before a norm, not behind it"


def _nothing_left(case: Case, x: Tensor) -> str | None:
    """Tell a stream that is not there from one that passes a norm, whose gain may have been silenced with the rest."""
    built = case.built(raw=True, fresh=True)
    with torch.no_grad():
        for p in built.module.parameters():
            if p.ndim > 1:
                p.zero_()
    left = case.call(built, x).detach()
    if not bool(left.any()):
        return "nothing is left: there is no residual connection"
    if worst_difference(left.double(), _normalised(case, x)).error < 1e-2:
        return (
            "the stream is normalised within the layer: a skip starts behind a norm (the norm's output is added to), "
            "not before it"
        )
    return None


def _stream_cause(case: Case, got: Tensor, x: Tensor) -> str | None:
    if not bool(got.any()):
        return _nothing_left(case, x)
    if worst_difference(got.double(), _normalised(case, x)).error < 1e-2:
        return "the stream is normalised: the skip starts behind the norm, or the layer is post-LN"
    if worst_difference(got, x).error < 1e-2 * size_of(x):
        return "the stream is not normalised: the layer is pre-LN"
    if worst_difference(got, x - x.mean(-1, keepdim=True)).error < 1e-2 * size_of(x):
        return (
            "the stream comes out without its mean: where a norm subtracts the mean, it subtracts it from the stream "
            "itself (in place, or what goes on as the residual is what was centred)"
        )
    ratio = float((got.double() * x.double()).sum() / x.double().square().sum())
    if worst_difference(got, ratio * x).error > 1e-2 * size_of(x):
        return None  # it is no multiple
    again = ": it is added twice, by each of two branches or once more behind them" if abs(ratio - 2) < 1e-3 else ""
    return f"the stream comes out {ratio:.3g} times as large{again}"


@holds(
    "residual.jacobian",
    statement="With silent sublayers the gradient passes a pre-LN layer unchanged.",
    formula="F = 0: d f(x) / d x = I",
    source=_HE,
    kinds=_LAYER,
    level="extended",
    unless=(*_SKIPS, excludes_fact("inference_only"), needs_fact("norm_placement", "pre")),
)
def the_skip_passes_gradients(case: Case) -> None:
    """d(x + F(x)) = I + dF, and dF = 0: every direction is an eigen-direction of eigenvalue one."""
    built = _silent(case)
    x = case.normal(2, 4, built.config.d_model, dtype=built.dtype).requires_grad_()
    weight = case.normal(*x.shape, dtype=built.dtype)
    output = case.call(built, x)
    case.require(
        case.apply(has_graph, output), "no gradient passes the layer", got="an output cut off from its input",
        expected="a gradient", asks=("inference_only", True),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad((output * weight).sum(), x, allow_unused=True)
    got = torch.zeros_like(x) if gradient is None else gradient
    case.close(got, weight, "the skip connection changes the gradient",
               bound=size_of(weight) * 16 * rounding_bound(built.dtype, 4))  # fmt: skip
    case.witness()


@holds(
    "residual.placement",
    statement="A pre-LN layer keeps the raw stream; a post-LN layer's output is normalised.",
    formula="pre-LN: f(a x) / a -> x for large a; post-LN: mean square of each token 1",
    source="Xiong et al. 2020, figure 1.",
    kinds=_LAYER,
    unless=(*_SKIPS, needs_fact("norm_placement", "pre", "post"), excludes_fact("norm", "none")),
    catches=("NM05",),
)
def the_norm_stands_where_declared(case: Case) -> None:
    """Sublayers of a pre-LN layer see normalised input, so what they add stays while the stream grows with a; and what
    they give stays in the stream, however large it is.
    """
    built = case.built(raw=True)
    large = 2.0**4 if built.dtype == torch.float16 and case.subject.fact("norm_placement") == "post" else 2.0**12
    x = case.normal(2, 4, built.config.d_model, dtype=built.dtype)
    got = case.call(built, x * large).detach().double()
    square = got.square().mean(dim=-1)
    case.witness()
    if case.subject.fact("norm_placement") == "pre":

        def drift_of(output: Tensor) -> Tensor:
            return (output / large - x.double()).norm() / x.double().norm()

        drift = drift_of(got)
        if bool(drift < 0.1) or not bool(drift_of(with_held_conditions(case, built, x, large)) < 0.1):
            case.require(
                drift < 0.1,
                "a pre-LN layer does not keep the raw stream",
                got=f"a part of {float(drift):.3g}",
                expected="less than 0.1",
                cause=lambda: _post_cause(square) or raw_inputs(case, built, x, large),
            )
        attention_stays_in_the_stream(case)
    elif built.is_fresh:
        worst = (square - 1).abs().max()
        case.require(
            worst < 0.02,
            "the output of a post-LN layer is not normalised",
            got=f"a mean square off by {worst:.3g}",
            expected="1",
            cause=lambda: _pre_cause(got, x, large),
        )


def _post_cause(square: Tensor) -> str | None:
    return "the output is normalised: the layer is post-LN" if float((square - 1).abs().max()) < 0.02 else None


def _pre_cause(got: Tensor, x: Tensor, large: float) -> str | None:
    kept = float((got / large - x.double()).norm() / x.double().norm())
    return "the raw stream comes out: the layer is pre-LN" if kept < 0.1 else None


@holds(
    "residual.rank-collapse",
    statement="Self-attention without skips, again and again, makes all tokens alike.",
    formula="norm(X_n - 1 m_n^T) / norm(X_n) -> 0 for X_(n+1) = attention(X_n)",
    source="Dong et al. 2021, theorem 2.2.",
    kinds=("self_attention",),
    level="extended",
    unless=(needs_module, needs_fact("causal", False), excludes_fact("window"), excludes_fact("sink"),
            excludes_fact("query_key_norm"), needs_fact("positions", "none")),  # small inputs spread no such weights
)  # fmt: skip
def attention_alone_collapses(case: Case) -> None:
    """Every row of weights is a mean. Small inputs keep the weights spread, so four steps suffice; a mean removed and a
    scale restored between steps leave the attention alone. What does not collapse holds a skip of its own.
    """
    built = case.built(raw=True)
    x = case.normal(1, 6, built.config.d_model, dtype=built.dtype) * 0.1
    limit = max(1e-2, 64 * epsilon(built.dtype)) * float(_spread(x))
    for _ in range(4):
        x = case.call(built, x).detach()
        size = size_of(x)
        if not size > 0:
            case.does_not_apply("its output is zero as built")
        x = x / size * 0.1
    case.require(_spread(x) < limit, "tokens stay apart although attention alone was applied four times",
                 got=f"a spread of {_spread(x):.3g}", expected=f"less than {limit:.3g}",
                 cause=lambda: "the attention adds its input: a skip connection inside")  # fmt: skip
    case.witness()


def _spread(x: Tensor) -> Tensor:
    wide = x.double()
    return (wide - wide.mean(dim=1, keepdim=True)).norm() / wide.norm()


@holds(
    "residual.depth-gradient",
    statement="Deep as it may be, the first and the last layer get gradients of comparable size at the start.",
    formula="1e-3 < norm(grad, layer N) / norm(grad, layer 1) < 1e3 for N = 16",
    source="Xiong et al. 2020, theorem 1 and figure 3; without skips the ratio is exponential in depth.",
    kinds=("encoder", "decoder", "classifier"),
    level="extended",
    unless=(
        needs_module,
        excludes_fact("residual", False),
        excludes_fact("shared_layers"),
        excludes_fact("stacked", False),
    ),
    examples_factor=0.2,
)
def gradients_reach_the_first_layer(case: Case) -> None:
    """At the subject's own initialisation. Post-LN grows towards the top and pre-LN shrinks, both by less than tenfold;
    gradients that vanish do so by many powers of ten. Of a ready-made instance, which may be trained, it is asked.
    """
    config = case.config()
    if case.subject.build is not None and "num_layers" not in case.subject.domain:
        config = replace(config, num_layers=16)
    built = case.bench.pool.fresh(config, case.dtype(), raw=True)
    lists = layer_lists(built.module, built.config) if isinstance(built.module, nn.Module) else []
    if not lists or config.num_layers < 6:
        case.does_not_apply("it has no list of at least 6 layers")
    tokens = ordinary(case.subject, built.config, case.generator, built.dtype).tensors[0].to(case.bench.device)
    norms = _gradient_norms(case, built, tokens, lists[0])
    if not norms.any() and case.subject.build is not None:
        drawn = case.bench.pool.fresh(config, built.dtype)
        if _gradient_norms(case, drawn, tokens, layer_lists(drawn.module, drawn.config)[0]).all():
            case.does_not_apply("no layer has a gradient as built, all have one later: a gain before them starts at 0")
    ratio = norms[-1] / norms[0].clamp(min=1e-300)
    case.require((ratio > 1e-3) & (ratio < 1e3), "gradients vanish or explode on their way to the first layer",
                 got=f"last over first {ratio:.3g}", expected="between 1e-3 and 1e3",
                 cause=lambda: _vanishing(norms.tolist()),
                 asks=None if case.subject.module is None else ("init", "other"))  # fmt: skip
    case.witness()


def _gradient_norms(case: Case, built: Built, tokens: Tensor, layers: list[nn.Module]) -> Tensor:
    output = case.call(built, tokens)
    weight = case.normal(*output.shape, dtype=output.dtype)
    names = {id(part): name for name, part in built.module.named_modules()}
    return case.apply(gradient_norms, (output * weight).sum(), built.module, [names[id(layer)] for layer in layers])


def gradient_norms(total: Tensor, module: nn.Module, layers: list[str]) -> Tensor:
    """Return the norm of the gradient of `total` in the parameters of each layer.

    Args:
        total: that depends on the module.
        module: that the layers are of.
        layers: names of them.
    """
    total.backward()
    return torch.stack([_gradient_norm(module.get_submodule(name)) for name in layers])


def _vanishing(norms: list[float]) -> str:
    told = f"(layer by layer {', '.join(f'{n:.0e}' for n in norms)})"
    silent = [number for number, norm in enumerate(norms) if norm == 0]
    if silent:
        where = f"{silent[0]}" + (f" to {silent[-1]}" if len(silent) > 1 else "")
        return f"no gradient reaches layer {where} at all: they are not connected to the output {told}"
    if norms[-1] > norms[0]:
        return f"gradients shrink in every layer: is a residual connection missing? {told}"
    grows = (norms[0] / norms[-1]) ** (1 / (len(norms) - 1)) if norms[-1] else 0.0
    if 1.7 < grows < 2.3:
        return f"gradients double in every layer: the stream, or what the layer gives, is added twice {told}"
    return f"gradients grow in every layer: are the layers too large at the start? {told}"


def _gradient_norm(layer: nn.Module) -> Tensor:
    squares = [p.grad.double().square().sum() for p in layer.parameters() if p.grad is not None]
    return torch.stack([torch.zeros((), dtype=torch.float64), *(s.cpu() for s in squares)]).sum().sqrt()
