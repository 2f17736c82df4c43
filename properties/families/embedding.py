"""Two doors into a model: token ids, and their embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.case import Case
from veriformer.properties.compare import size_of, worst_difference
from veriformer.properties.embedding_leaf import at_embedding
from veriformer.properties.pool import Built
from veriformer.properties.premises import needs_fact, needs_part
from veriformer.properties.property import holds


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
    leaf, _ = at_embedding(built.module, tokens, lambda: case.call(built, tokens))
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
    """Try the embeddings scaled by sqrt(d_model), or divided by it."""
    width = embeddings.shape[-1]
    for words, factor in (("not scaled", width**0.5), ("scaled twice", width**-0.5)):
        again = case.ask("embed", embeddings * factor, built=built)
        if worst_difference(again.detach(), expected, size_of(expected)).error <= case.tolerance():
            return f"the embeddings are {words} by sqrt(d_model) at this door"
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
                       cause=lambda: "the table does not know its padding_idx")  # fmt: skip
    case.witness()
