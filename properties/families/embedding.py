"""Two doors into a model: token ids, and their embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.embedding_leaf import at_embedding
from veriformer.properties.engine.premises import needs_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.probes.structure import first_input


@holds(
    "embedding.entry",
    statement="Token ids and the embeddings of these tokens give the same output.",
    formula="f(tokens) = f_embed(E[tokens])",
    source="Two doors to one model: `inputs_embeds` of Hugging Face, prompt tuning, attribution methods.",
    kinds=("encoder", "decoder", "classifier"),
    unless=needs_part("embed"),
    catches=("EM05",),
)
def both_doors_lead_to_one_model(case: Case) -> None:
    """The embeddings are read where the model itself looks the tokens up. Scale, positions and norms that one door
    applies and the other forgets, or applies twice, show here; with padding too, where the subject takes it.
    """
    built = case.built()
    if not isinstance(built.module, nn.Module) or not case.subject.takes_tokens:
        case.does_not_apply("it has no table of token embeddings")
    tokens = case.tokens(2, case.length("T", low=1, high=6))
    leaf, _ = case.apply(at_embedding, built.module, tokens, case.caller(built, tokens))
    if leaf is None:
        case.does_not_apply("no nn.Embedding of it looks the tokens up")
    embeddings = leaf.detach().clone()
    masks: list[Tensor | None] = [None]
    if case.subject.takes_mask("padding") and tokens.shape[1] > 1:
        padded = torch.ones_like(tokens, dtype=torch.bool)
        padded[0, -1] = False
        masks.append(padded)
    for mask in masks:
        expected = case.call(built, tokens, attention_mask=mask).detach()
        given: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        got = case.ask("embed", embeddings, built=built, **given).detach()
        if mask is not None and expected.ndim == 3:
            got, expected = got[mask], expected[mask]
        case.close(got, expected, "embeddings give another output than their tokens",
                   cause=partial(_cause, case, built, expected, embeddings))  # fmt: skip
    case.witness()


def _cause(case: Case, built: Built, expected: Tensor, embeddings: Tensor) -> str | None:
    """Try the embeddings scaled by sqrt(d_model), or divided by it, and with the rows of a table of positions."""
    width = embeddings.shape[-1]
    for words, factor in (("not scaled", width**0.5), ("scaled twice", width**-0.5)):
        again = case.ask("embed", embeddings * factor, built=built)
        if worst_difference(again.detach(), expected, size_of(expected)).error <= case.tolerance():
            return f"the embeddings are {words} by sqrt(d_model) at this door"
    for name, table in built.module.named_parameters():
        rows = table.detach().flatten(0, -2) if table.ndim > 1 else table[None]
        if rows.shape[-1] != width or len(rows) < embeddings.shape[1]:
            continue
        for words, sign in (("not added", 1.0), ("added twice", -1.0)):
            again = case.ask("embed", embeddings + sign * rows[: embeddings.shape[1]], built=built)
            if worst_difference(again.detach(), expected, size_of(expected)).error <= case.tolerance():
                return f"the positions ({name}) are {words} at this door: with them the output is that of the tokens"
    return None


@holds(
    "embedding.padding-row",
    statement="Where a padding token is declared, its embedding starts as zero and no gradient reaches it.",
    formula="E[padding_idx] = 0 after build(), dL / dE[padding_idx] = 0",
    source="torch.nn.Embedding, padding_idx; an initialisation that runs later overwrites the row.",
    kinds=("encoder", "decoder", "classifier"),
    level="extended",
    unless=(needs_part("build"), needs_fact("padding_idx")),
    examples_factor=0.25,
    catches=("EM01",),
)
def the_padding_row_stays_zero(case: Case) -> None:
    """Speaks of subjects that declare `padding_idx` alone: where attention masks padding anyway, the row may be what it
    likes. A tied output projection has a gradient of its own there, so only the start is judged then.
    """
    built = case.bench.pool.fresh(case.config(), torch.float32, raw=True)
    tables = [m for m in built.module.modules() if isinstance(m, nn.Embedding)]
    table = next((m for m in tables if m.num_embeddings == built.config.vocab_size), None)
    if table is None:
        case.does_not_apply("no nn.Embedding of the vocabulary is found in it")
    row = int(case.subject.fact("padding_idx"))
    zeros = torch.zeros_like(table.weight[row])
    case.exact(table.weight[row].detach(), zeros, "the embedding of the padding token is not zero after build()",
               cause=lambda: "the initialisation overwrites the row of padding_idx")  # fmt: skip
    if not case.subject.fact("tied", False):
        tokens = case.tokens(2, 4)
        tokens[:, -1] = row
        (gradient,) = torch.autograd.grad(case.call(built, tokens).square().sum(), [table.weight], allow_unused=True)
        if gradient is not None:
            case.exact(gradient[row], zeros, "a gradient reaches the embedding of the padding token",
                       cause=lambda: "what looks the row up is not given its padding_idx")  # fmt: skip
    case.witness()


@holds(
    "positions.distinct",
    statement="Where positions are added to the tokens, one token enters the first layer otherwise at every position.",
    formula="x_0(t) = E[w] + P(t), P(s) != P(t) for s != t",
    source="Vaswani et al. 2017, section 3.5; defects: tables indexed by t // 2, by the batch, or by a constant.",
    kinds=("encoder", "decoder", "classifier"),
    unless=needs_fact("positions", "sinusoidal", "learned"),
    examples_factor=0.25,
    catches=("PE07", "PE-halved"),
)
def every_position_has_a_vector_of_its_own(case: Case) -> None:
    """One token is repeated T times and what the first norm or linear map gets is compared position by position. A
    causal mask hides a table that gives two neighbours one row; here it does not.
    """
    built = case.built(dtype=torch.float32)
    if not isinstance(built.module, nn.Module) or not case.subject.takes_tokens:
        case.does_not_apply("it takes no tokens")
    length = case.length("T", low=4, high=12)
    tokens = torch.full((1, length), case.integer("token", 0, built.config.vocab_size - 1), device=case.bench.device)
    entered = case.apply(first_input, built.module, built.config.d_model, case.caller(built, tokens))
    if entered is None or entered.shape[1] < length:
        case.does_not_apply("no norm or linear map of it gets a sequence of d_model channels")
    rows = entered[0, -length:].double()  # class and register tokens stand before
    apart = (rows[:, None] - rows[None]).abs().amax(-1) + torch.eye(length, device=rows.device)
    if float(apart.amax()) <= 1 and not bool((apart - torch.eye(length, device=rows.device)).any()):
        case.does_not_apply("nothing is added before the first layer")
    one, two = divmod(int(apart.argmin()), length)
    case.require(
        apart.min() > 1e-6 * size_of(rows),
        f"positions {one} and {two} get the same vector",
        got=f"a difference of {float(apart.min()):.3g}",
        expected="another vector at every position",
        cause=lambda: _same_rows(apart),
    )
    case.witness()


def _same_rows(apart: Tensor) -> str:
    same = (apart == apart.min()).nonzero().tolist()
    steps = sorted({abs(a - b) for a, b in same})
    if steps == [1]:
        return "neighbours share a vector: is a position halved, or cut to whole numbers?"
    return f"vectors come again after {steps[0]} positions"
