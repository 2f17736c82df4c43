"""Whether training merges the most frequent pair each time; part of `tokenizer.bpe-merges`."""

from __future__ import annotations

import torch

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.segmentation import (
    after,
    as_dict,
    as_list,
    as_pairs,
    listed,
    merged_ids,
    rare_merge,
)
from veriformer.properties.engine.case import Case
from veriformer.properties.formulas.tokenizing.merging import counts_cause

_LETTERS = "abc"
_SIZE = 262
"""Of a vocabulary that is trained: some merges behind 256 bytes."""
_TELLING = tuple(
    " ".join(word for word, n in zip(words.split(), counts, strict=True) for _ in range(n))
    for words, counts in (
        ("aabca acaccc cccb bca abab", (8, 6, 7, 3, 5)),
        ("abcabd cabd dabc bdca ddab cab", (3, 9, 5, 4, 6, 2)),
        ("banana bandana cabana anna nab", (4, 7, 3, 9, 6)),
    )
)
"""Texts of which stale counts of each sort learn other merges."""


def encoded(case: Case, built: Built, text: str) -> list[int]:
    """Return the ids of a text.

    Raises:
        SubjectError: `forward` returned no list of integers.
    """
    output = case.ask("forward", text, built=built)
    ids = output.tolist() if hasattr(output, "tolist") else output
    if not isinstance(ids, list | tuple) or not all(isinstance(i, int) for i in ids):
        raise SubjectError(f"forward returned {type(output).__name__}, where a list of token ids is required")
    return ids if isinstance(ids, list) else case.apply(as_list, ids)


def training_merges_the_most_frequent(case: Case) -> None:
    """Train on one long word beside some short ones, and on words that share pairs; nothing where it is not offered."""
    if case.subject.train is None:
        return
    letters = f"{_LETTERS} "
    drawn = torch.randint(len(letters), (case.integer("corpus", 4, 80),), generator=case.generator)
    corpus = "".join(letters[i] for i in drawn.tolist())
    _judge(case, " ".join([*[corpus[:3]] * 5, corpus]), _SIZE)  # words count as often as they occur
    _judge(case, _of_frequent_words(case), _SIZE + case.integer("more", 0, 20))


def _of_frequent_words(case: Case) -> str:
    """Return words that share pairs, each several times: a merge takes pairs off as often as its word occurs."""

    def drawn(most: int, size: int) -> list[int]:
        numbers: list[int] = torch.randint(most, (size,), generator=case.generator).tolist()
        return numbers

    words = ["".join(_LETTERS[i] for i in drawn(len(_LETTERS), 2 + n)) for n in drawn(5, 8)]
    return " ".join(word for word, n in zip(words, drawn(9, len(words)), strict=True) for _ in range(n + 1))


def _judge(case: Case, corpus: str, size: int) -> None:
    first = encoded(case, case.built(dtype=torch.float32), corpus)  # the words that another one learns from
    words, merges, model = _learnt(case, corpus, size)
    wrong = case.apply(rare_merge, words, merges)
    number, pair, occurs, most, better = wrong or (0, (), 0, 0, "none")
    case.equal(
        wrong,
        (),
        f"merge {number} of the training on {corpus!r} is not a most frequent pair"[:150],
        got=f"{pair}, which occurs {occurs} times",
        expected=f"a pair that occurs {most} times, as {better}",
        cause=lambda: _cause(case),
    )
    vocabulary = case.apply(as_dict, case.ask("vocabulary", built=model))
    case.equal(
        case.apply(after, first, encoded(case, model, corpus)),
        case.apply(merged_ids, words, merges, vocabulary, case.subject.fact("unknown_id", -1)),
        f"a tokenizer that was trained on {corpus!r} does not encode it by the merges that it learnt"[:150],
        cause=lambda: _of_the_first(encoded(case, model, corpus), first),
    )


def _of_the_first(ids: list[int], first: list[int]) -> str | None:
    return (
        "the ids are those that another tokenizer, with other merges, gave for these words: what is kept of words (a "
        "cache on the class, or of the module) is shared by all tokenizers"
        if ids == first
        else None
    )


def _learnt(case: Case, corpus: str, size: int) -> tuple[list[list[str]], list[tuple[str, ...]], Built]:
    trained = case.ask("train", [corpus], size)
    model = Built(trained, case.config(), torch.float32, is_fresh=False)
    merges = case.apply(as_pairs, case.ask("merges", built=model))
    return case.apply(listed, case.ask("words", corpus, built=model)), merges, model


def _cause(case: Case) -> str | None:
    with off_the_record(case):
        return counts_cause(_learnt(case, corpus, _SIZE + 20)[:2] for corpus in _TELLING)
