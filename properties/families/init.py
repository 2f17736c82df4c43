"""Initial weights: what a model is before it has learnt anything. Judged with the subject's own initialisation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import Stream
from veriformer.properties.families.init_tables import tables_start_alike
from veriformer.properties.probes.module_parts import writers
from veriformer.properties.probes.structure import first_to_change
from veriformer.properties.subject.inputs import ordinary
from veriformer.properties.subject.subject import Subject

_MODELS = ("encoder", "decoder", "encoder_decoder", "classifier")
_STACKS = ("encoder", "decoder")
Z = 6.1
"""Standard deviations of a false-alarm rate of 1e-9, both sides."""


def initial(case: Case, **wanted: int) -> Built:
    """Return a model with its own initial weights, of the sizes wanted where `domain` leaves them open."""
    config = case.config()
    sizes = {name: size for name, size in wanted.items() if name not in case.subject.domain}
    if "d_model" in sizes and "num_heads" not in sizes and sizes["d_model"] % config.num_heads:
        sizes["d_model"] -= sizes["d_model"] % config.num_heads
    wide = replace(config, **sizes)
    if wide.num_heads % wide.num_key_value_heads:
        wide = replace(wide, num_key_value_heads=wide.num_heads)
    built = case.bench.pool.fresh(wide, torch.float32, raw=True)
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("it is no module, so it has no initial weights")
    return built


@holds(
    "init.entropy",
    statement="Before training attention is spread out: its entropy is near ln T, however wide the heads.",
    formula="H(softmax(scores)) ~ ln T - var(scores) / 2 >= ln T - 2, scores of unit variance or less",
    source="Vaswani et al. 2017, 3.2.1, footnote 4.",
    kinds=("self_attention", "cross_attention"),
    level="extended",
    unless=(needs_part("weights"), needs_part("build"), excludes_fact("causal")),
    examples_factor=0.25,
    catches=("SC01",),
)
def attention_starts_spread_out(case: Case) -> None:
    """With heads of 64 channels the missing scale multiplies the variance of the scores by 64, and a quarter of the
    keys takes all the weight. Normal scores of variance s^2 lose s^2 / 2 of the entropy; 2 nats allow for s^2 = 4.
    """
    built = initial(case, d_model=256, num_heads=4, num_key_value_heads=4)
    length = 64
    inputs = [case.normal(2, length, built.config.d_model, dtype=torch.float32)]
    if case.subject.kind == "cross_attention":
        inputs.append(case.normal(2, length, built.config.d_model, dtype=torch.float32))
    weights = case.ask("weights", *inputs, built=built).detach().double()
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1).mean()
    lost = math.log(length) - entropy
    case.require(
        lost < 2,
        f"attention with heads of {built.config.d_head} channels is peaked before any training",
        got=f"entropy {entropy:.3f} nats",
        expected=f"ln {length} = {math.log(length):.3f}, less 2 at most",
        error=lost,
        tolerance=2.0,
        cause=lambda: "scores are not divided by sqrt(d_head)" if built.config.d_head >= 16 else None,
    )
    case.witness()


@holds(
    "init.token-spread",
    statement="Before training tokens stay apart through the layers of a residual stack.",
    formula="||X_N - mean(X_N)|| / ||X_N|| > 1 / (16 N) at N = 8; without residuals it falls doubly exponentially",
    source="Dong et al. 2021, theorem 1; the bound is derived below.",
    kinds=_STACKS,
    level="extended",
    unless=(needs_part("build"), needs_fact("residual", True), excludes_fact("norm", "none")),
    examples_factor=0.25,
)
def tokens_stay_apart(case: Case) -> None:
    """A residual stream keeps what tells tokens apart, while what its 2N sublayers bring to all tokens alike adds up to
    2N times what the first one brings, at most (layers that start as copies, biases that all point the same way): the
    spread falls as 1 / (2N) of what one sublayer leaves. At random that is about a half; an eighth of it is allowed
    for widths of 8, where few numbers make it up. So 1 / (16 N). Of 1,000 draws of torch's default initialisation,
    with embeddings of 0.02, the smallest is twice that; a stack without residuals is at 1e-7, and at 1e-2 to 1e-5
    where it is causal (the first token sees itself alone).
    """
    built = initial(case, num_layers=8)
    stream = Stream(case, built)
    length = 12
    x = stream.draw(2, length)
    if not x.is_floating_point():
        x = torch.arange(length, device=x.device)[None] + torch.arange(2, device=x.device)[:, None]
        x = x % built.config.vocab_size
    output = stream(x).detach().double()
    centred = output - output.mean(1, keepdim=True)
    spread = (centred.norm(dim=(1, 2)) / output.norm(dim=(1, 2)).clamp(min=1e-300)).min()
    case.require(
        spread > 1 / (16 * built.config.num_layers),
        f"the outputs of all positions are almost the same after {built.config.num_layers} layers, before any training",
        got=f"a spread of {spread:.3g}",
        expected=f"> {1 / (16 * built.config.num_layers):.3g}",
        cause=lambda: _collapse(built, float(spread)),
    )
    case.witness()


def _collapse(built: Built, spread: float) -> str | None:
    tables = {name: m for name, m in built.module.named_modules() if isinstance(m, nn.Embedding)}
    constant = [name for name, table in tables.items() if float(table.weight.detach().std()) == 0]
    if constant:
        return f"the table {constant[0]} starts the same for every token"
    return "the tokens have collapsed: is a residual connection missing?" if spread < 1e-3 else None


def _weight_of_linear(module: nn.Module) -> list[tuple[str, Tensor]]:
    shared = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    return [
        (f"{name}.weight" if name else "weight", part.weight.detach().double())
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and id(part.weight) not in shared
    ]


@holds(
    "init.xavier",
    statement="Every linear map starts uniform within sqrt(6 / (fan_in + fan_out)).",
    formula="|w| <= a = sqrt(6 / (n_in + n_out)), var(w) = a^2 / 3",
    source="Glorot & Bengio 2010, equation 16.",
    kinds=("self_attention", "cross_attention", "feed_forward", "layer", *_MODELS),
    level="extended",
    unless=(needs_part("build"), needs_fact("init", "xavier")),
    examples_factor=0.25,
)
def linear_maps_start_uniform(case: Case) -> None:
    """The bound is strict; the variance is estimated from n weights with a standard deviation of 0.9 / sqrt(n)."""
    built = initial(case)
    weights = [*_weight_of_linear(built.module), *_of_stacks(built)]
    if not weights:
        case.does_not_apply("it has no nn.Linear")
    for name, weight in weights:
        bound = math.sqrt(6 / sum(weight.shape))
        largest = weight.abs().max()
        case.require(
            largest <= bound * (1 + 1e-6), f"a weight of {name} lies outside the bounds", got=f"{largest:.4g}",
            expected=f"at most {bound:.4g}", cause=partial(_scheme, weight, bound),
        )  # fmt: skip
        ratio = weight.square().mean() / (bound**2 / 3)
        slack = Z * math.sqrt(0.8 / weight.numel())  # var(w^2) = a^4 (1/5 - 1/9)
        case.require(
            (ratio - 1).abs() <= slack, f"the variance of {name} is not that of Xavier's initialisation",
            got=f"{ratio:.4g} of it", expected=f"1 within {slack:.3g}", cause=partial(_scheme, weight, bound),
        )  # fmt: skip
    case.witness()


def _of_stacks(built: Built) -> list[tuple[str, Tensor]]:
    """Return the first matrix of every stack `[E, in, out]` of experts' maps, which start each as one map does."""
    widths = {built.config.d_model, built.config.d_ff}
    stacks = [(name, p.detach().double()) for name, p in built.module.named_parameters() if p.ndim == 3 and len(p) > 1]
    return [(f"{name}[0]", stack[0]) for name, stack in stacks if set(stack.shape[1:]) == widths]


def _scheme(weight: Tensor, bound: float) -> str | None:
    std, rows, columns = float(weight.std()), *weight.shape
    schemes = {
        "uniform within 1/sqrt(fan_in), torch's default": (3 * columns) ** -0.5,
        "normal with 0.02": 0.02,
        "He's, sqrt(2 / fan_in)": (2 / columns) ** 0.5,
        "uniform within 1/sqrt(fan_out)": (3 * rows) ** -0.5,
    }
    name = min(schemes, key=lambda scheme: abs(schemes[scheme] - std))
    return f"the spread is that of an initialisation {name}" if abs(schemes[name] / std - 1) < 0.1 else None


@holds(
    "init.residual-scaling",
    statement="Matrices that write into the residual stream start 1 / sqrt(2N) as large as the others.",
    formula="std(W_out) = std(W) / sqrt(2N): the variance of the stream does not grow with N",
    source="Radford et al. 2019, 2.3; documented bugs IN07, IN08.",
    kinds=_STACKS,
    level="extended",
    unless=(needs_part("build"), needs_fact("init", "gpt2"), excludes_fact("shared_layers")),
    examples_factor=0.25,
    catches=("IN07", "IN08"),
)
def what_writes_starts_smaller(case: Case) -> None:
    """Two writes a layer add up 2N variances of 1 / 2N. Of n weights a deviation errs by 1 / sqrt(2n). Tables too."""
    built = initial(case, d_model=48, num_heads=4, num_key_value_heads=4, num_layers=4)
    last = writers(built.module, built.config)
    if not last:
        case.does_not_apply("no layers of the configured number are found in it")
    inside = {id(p) for part in built.module.modules() if isinstance(part, nn.ModuleList) for p in part.parameters()}
    others = [
        p for p in built.module.parameters()
        if p.ndim == 2 and id(p) in inside and all(p is not w for w in last.values())
    ]  # fmt: skip
    wanted = (2 * built.config.num_layers) ** -0.5
    usual = torch.cat([p.detach().flatten().double() for p in others])
    for name, weight in last.items():
        ratio = weight.detach().double().square().mean().sqrt() / usual.square().mean().sqrt()
        slack = Z * math.sqrt(0.5 / weight.numel() + 0.5 / usual.numel())
        case.require(
            (ratio / wanted - 1).abs() <= slack,
            f"{name} writes into the stream and does not start 1/sqrt(2N) as large as the other matrices",
            got=f"{ratio:.3f} as large",
            expected=f"{wanted:.3f}, within {slack:.1%}",
            cause=partial(_factor_words, name, float(ratio), built.config.num_layers),
        )
    tables_start_alike(case, built.module, float(usual.square().mean().sqrt()), Z)
    case.witness()


def _foretells_its_input(subject: Subject) -> str | None:
    if subject.fact("tied") and subject.fact("embedding_scale"):
        return "tied embeddings scaled by sqrt(d_model) foretell the input token at first, by a logit of sqrt(d_model)"
    return None


def _factor_words(name: str, ratio: float, layers: int) -> str | None:
    """Name the factor on the initial weights of a matrix that writes into the stream, beside those of the others."""
    n = max(layers, 1)
    known = {
        f"{name} starts as large as all others: the factor 1/sqrt(2N) is missing, or what sets all weights alike runs "
        "after it": 1.0,
        f"{name} starts 1/sqrt(N) as large as the others, N = {n}: a layer writes into the stream twice, so that it "
        "is 1/sqrt(2N)": n**-0.5,
        f"{name} starts 1/(2N) as large as the others: the square root is missing": 1 / (2 * n),
        f"{name} starts 1/N as large as the others": 1 / n,
    }
    near = [words for words, factor in known.items() if abs(ratio / factor - 1) < 0.15]
    return near[0] if near and abs(ratio * math.sqrt(2 * n) - 1) > 0.15 else None


@holds(
    "init.loss",
    statement="Before training the cross-entropy is about that of guessing, ln V.",
    formula="E L = ln V + var(logits) / 2 <= ln V + 1.5",
    source="Logits of a variance up to 3; tied embeddings of unit variance give d instead.",
    kinds=("decoder", "encoder_decoder"),
    level="extended",
    unless=(needs_part("build"), _foretells_its_input, excludes_fact("init", "default", "other")),
    asks=("init", "other"),
    examples_factor=0.5,
)
def the_first_loss_is_that_of_guessing(case: Case) -> None:
    """For labels that are drawn apart from the input. A scheme that nobody chose (torch's default for a table is a
    standard deviation of 1) is asked about, not judged. Unit normal logits lose a half nat; half the logits of a wide
    model with unscaled tied embeddings lose tens.
    """
    built = initial(case, d_model=64, num_heads=4, num_key_value_heads=4)
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    logits = case.call(built, *[x.to(case.bench.device) for x in inputs.tensors]).detach().double()
    vocabulary = built.config.vocab_size
    if logits.shape[-1] != vocabulary:
        case.does_not_apply("its outputs are no logits over the vocabulary")
    mean = (torch.logsumexp(logits, -1) - logits.mean(-1)).mean()  # of labels drawn uniformly, exactly
    excess = mean - math.log(vocabulary)
    case.require(
        excess < 1.5,
        "the loss before training is far above that of guessing",
        got=f"{mean:.3f} nats",
        expected=f"about ln {vocabulary} = {math.log(vocabulary):.3f}",
        error=excess,
        tolerance=1.5,
        cause=lambda: (
            f"the logits have a variance of {float(logits.var()):.3g}: was the output layer, or the table tied to it,"
            " drawn with a standard deviation of 1?"
        ),
    )
    case.witness()


@holds(
    "init.embedding-scale",
    statement="Token embeddings enter the first layer times sqrt(d_model) where that is declared, else as they are.",
    formula="d x_0 / d E = sqrt(d_model) (embedding_scale) or 1",
    source="Vaswani et al. 2017, 3.4.",
    kinds=("encoder", "decoder", "encoder_decoder", "classifier"),
    level="extended",
    unless=(needs_part("build"), needs_fact("embedding_scale")),
    examples_factor=0.5,
)
def embeddings_are_scaled_once(case: Case) -> None:
    """Doubles the table on a copy and looks at what the first norm or linear map gets. bfloat16 rounds by 2^-8."""
    built = case.built(dtype=torch.float32, fresh=True)
    tables = [m for m in built.module.modules() if isinstance(m, nn.Embedding)]
    tables = list({id(m.weight): m for m in tables if m.num_embeddings == built.config.vocab_size}.values())
    if not tables or not case.subject.takes_tokens:
        case.does_not_apply("no nn.Embedding of the vocabulary is found in it")
    both = case.subject.kind == "encoder_decoder"
    sides = [case.tokens(2, 5), case.tokens(2, 5)] if both else [case.tokens(2, 5)]
    at = case.integer("side", 0, len(sides) - 1) if both else 0
    others = [(side + 1) % built.config.vocab_size if i == at else side for i, side in enumerate(sides)]
    runs = [case.caller(built, *side) for side in (sides, others)]
    tokens, width = sides[at], built.config.d_model
    before = case.apply(first_to_change, built.module, width, *runs)
    if before is None:
        case.does_not_apply("no norm or linear map of it gets a sequence of d_model channels")
    owns = [table.weight.detach()[tokens].clone() for table in tables]
    with torch.no_grad():
        for table in tables:
            table.weight.mul_(2)
    after = case.apply(first_to_change, built.module, width, *runs)
    assert after is not None
    grown = _of_tokens(after - before, *tokens.shape)
    if grown is None:
        case.does_not_apply("the first norm or linear map does not get one vector a token")
    owns = [own for own in owns if own.shape == grown.shape]
    if not owns:
        case.does_not_apply("its table of tokens has other widths than the first layer: it is mapped before")
    factors = [((grown * own).sum() / own.square().sum()).double() for own in owns]
    misfits = [
        float((grown - f.to(own.dtype) * own).norm() / grown.norm().clamp(min=1e-12))
        for f, own in zip(factors, owns, strict=True)
    ]
    misfit, factor = min(zip(misfits, factors, strict=True), key=lambda pair: float(pair[0]))
    if misfit > 1e-3:
        case.does_not_apply("embeddings do not enter the first layer as a multiple of themselves")
    wanted = built.config.d_model**0.5 if case.subject.fact("embedding_scale") else 1.0
    if case.subject.fact("structure") == "other" and _factor(float(factor), built.config.d_model) is None:
        case.does_not_apply("its first layer takes the embeddings times a factor of its own")
    error = (factor / wanted - 1).abs()
    case.require(
        error < 2**-8,
        "embeddings do not enter the first layer with the declared factor",
        got=f"{factor:.5g}",
        expected=f"{wanted:.5g}",
        error=error,
        tolerance=2**-8,
        cause=lambda: _factor(float(factor), built.config.d_model),
    )
    case.witness()


def _of_tokens(x: Tensor, batch: int, length: int) -> Tensor | None:
    """Return what belongs to the tokens, `[B, T, D]`: class and register tokens stand before, time may come first."""
    if x.shape[0] == batch and x.shape[1] >= length:
        return x[:, -length:]
    if x.shape[1] == batch and x.shape[0] >= length:
        return x[-length:].transpose(0, 1)
    return None


def _factor(factor: float, width: int) -> str | None:
    known = {"not scaled": 1.0, "scaled twice": float(width), "scaled once": width**0.5, "divided": width**-0.5}
    name = min(known, key=lambda words: abs(known[words] - factor))
    return f"the embeddings are {name}" if abs(known[name] / factor - 1) < 2**-8 else None
