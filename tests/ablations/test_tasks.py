"""Tasks: labels against brute force, chance and floors against enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from veriformer.ablations.tasks import IGNORED, TASKS, facts, language, masked
from veriformer.ablations.tasks.task import SORTED_BLIND


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_a_function_of_the_seed(name: str) -> None:
    task = TASKS[name]
    one, two, other = task.draw(3, 64), task.draw(3, 64), task.draw(4, 64)
    assert all(torch.equal(a, b) for a, b in zip(one.inputs, two.inputs, strict=True))
    assert torch.equal(one.labels, two.labels)
    assert not torch.equal(one.inputs[0], other.inputs[0])


@pytest.mark.parametrize("name", TASKS)
def test_tokens_and_labels_are_in_range(name: str) -> None:
    task = TASKS[name]
    samples = task.draw(0, 256)
    assert len(samples.labels) == len(samples.inputs[0]) == 256
    for tokens in samples.inputs:
        if not tokens.is_floating_point():
            assert tokens.min() >= 0
            assert tokens.max() < task.vocab_size
    judged = samples.labels[samples.labels != IGNORED]
    assert len(judged)
    assert judged.min() >= 0
    assert judged.max() < (task.num_classes or task.vocab_size)


@pytest.mark.parametrize("name", [n for n, t in TASKS.items() if t.num_classes])
def test_classes_are_balanced_so_that_chance_is_chance(name: str) -> None:
    task = TASKS[name]
    share = torch.bincount(task.draw(0, 8192).labels, minlength=task.num_classes) / 8192
    # five standard errors of a share of 8192 draws
    assert (share - task.chance).abs().max() < 5 * math.sqrt(task.chance / 8192)


def _precede(x: list[int]) -> int:
    return int(x.index(0) < x.index(1))


def _bigram(x: list[int]) -> int:
    return int((0, 1) in list(itertools.pairwise(x)))


def _mode(x: list[int]) -> int:
    times = sorted(((x.count(token), token) for token in range(4)), reverse=True)
    assert times[0][0] == times[1][0] + 1 == times[3][0] + 1
    return times[0][1]


CLASSES = {
    "precede": _precede,
    "bigram": _bigram,
    "first": lambda x: x[0],
    "count": lambda x: x.count(0),
    "majority": lambda x: int(x.count(1) > x.count(0)),
    "needle": lambda x: next(t for t in x if t < 4),
    "after": lambda x: x[x.index(7) + 1],
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("length", [8, 16])
def test_labels_are_what_the_statement_says(name: str, length: int) -> None:
    samples = TASKS[name].draw(1, 200, length)
    for tokens, label in zip(samples.inputs[0].tolist(), samples.labels.tolist(), strict=True):
        assert CLASSES[name](tokens) == label


@pytest.mark.parametrize("length", [9, 25])
def test_the_mode_is_ahead_by_one(length: int) -> None:
    samples = TASKS["mode"].draw(1, 200, length)
    assert [_mode(x) for x in samples.inputs[0].tolist()] == samples.labels.tolist()


def test_one_label_in_ten_is_wrong_and_no_more() -> None:
    task, samples = TASKS["noisy-precede"], TASKS["noisy-precede"].draw(0, 8192)
    truth = torch.tensor([_precede(x) for x in samples.inputs[0].tolist()])
    # four standard errors of a share of 8192
    assert float((truth == samples.labels).double().mean()) == pytest.approx(0.9, abs=4 * 0.3 / 8192**0.5)
    assert task.best == pytest.approx(0.9)
    assert task.loss_floor == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9))


@pytest.mark.parametrize("name", ["precede", "bigram"])
def test_order_tasks_are_closed_under_the_swap_that_turns_the_label(name: str) -> None:
    samples = TASKS[name].draw(0, 100)
    even, odd = samples.inputs[0][::2], samples.inputs[0][1::2]
    assert torch.equal(even.sort(dim=1).values, odd.sort(dim=1).values)
    assert torch.equal(samples.labels[::2], 1 - samples.labels[1::2])


def test_the_order_of_first_is_not_told_by_the_majority() -> None:
    tokens = TASKS["first"].draw(0, 500).inputs[0]
    assert (tokens.sum(dim=1) == 4).all()


def _answers(name: str) -> tuple[list[list[int]], list[list[int]]]:
    samples = TASKS[name].draw(2, 100)
    whole = torch.cat([samples.inputs[0], samples.labels[:, -1:]], dim=1).tolist()
    asked = [[t for t in row if t != IGNORED] for row in samples.labels.tolist()]
    return whole, asked


@pytest.mark.parametrize(
    ("name", "change"),
    [("copy", list), ("reverse", lambda p: p[::-1]), ("sort", sorted)],
    ids=["copy", "reverse", "sort"],
)
def test_transductions(name: str, change: object) -> None:
    for whole, asked in zip(*_answers(name), strict=True):
        assert asked == list(change(whole[:6]))  # type: ignore[operator]


def test_selective_copy_asks_for_the_symbols_in_order() -> None:
    for whole, asked in zip(*_answers("selective-copy"), strict=True):
        assert asked == [t for t in whole[:12] if t < 8]


def test_addition_adds() -> None:
    for whole, asked in zip(*_answers("addition"), strict=True):
        n = (len(asked)) - 1
        first, second = whole[:n], whole[n + 1 : 2 * n + 1]
        value = lambda digits: sum(d * 10**i for i, d in enumerate(digits))  # noqa: E731
        assert value(first) + value(second) == value(asked)


def test_hops_go_twice_around_the_listed_cycle() -> None:
    for whole, asked in zip(*_answers("hops"), strict=True):
        n = TASKS["hops"].length
        image = {whole[2 * i]: whole[2 * i + 1] - n for i in range(n)}
        start = whole[2 * n + 1]
        assert asked == [image[image[start]] + n]
        assert image[image[start]] not in (start, image[start])


def test_induction_asks_only_where_the_past_tells() -> None:
    samples = TASKS["induction"].draw(2, 100)
    for tokens, labels in zip(samples.inputs[0].tolist(), samples.labels.tolist(), strict=True):
        for place, label in enumerate(labels):
            if label != IGNORED:
                earlier = [i for i in range(place) if tokens[i] == tokens[place]]
                assert earlier
                assert tokens[earlier[-1] + 1] == label


def test_chance_of_sorting_blind_is_enumerated() -> None:
    every = torch.cartesian_prod(*[torch.arange(8)] * 6).sort(dim=1).values
    right, prefix = 0, torch.zeros(len(every), dtype=torch.long)
    for place in range(6):
        key = prefix * 8 + every[:, place]
        right += int(torch.bincount(key, minlength=8 ** (place + 1)).view(-1, 8).max(dim=1).values.sum())
        prefix = key
    assert right / len(every) / 6 == pytest.approx(SORTED_BLIND, abs=1e-12)


def test_the_source_has_the_entropy_and_the_best_that_it_says() -> None:
    samples = TASKS["source"].draw(0, 4000)
    matrix = language.source_transition()
    tokens, labels = samples.inputs[0], samples.labels
    before, following = tokens[:, :-1][labels[:, 1:] != IGNORED], labels[:, 1:][labels[:, 1:] != IGNORED]
    surprise = -matrix[before, following].log()
    error = float(surprise.std() / math.sqrt(len(surprise)))
    # tokens of one sequence depend on each other, so the standard error is doubled; four of those
    assert abs(float(surprise.mean()) - TASKS["source"].loss_floor) < 8 * error
    hit = (matrix[before].argmax(dim=1) == following).double().mean()
    assert float(hit) == pytest.approx(TASKS["source"].best, abs=0.01)


def test_memorise_is_one_table_for_all() -> None:
    first, second = TASKS["memorise"].draw(0, 2000), TASKS["memorise"].draw(1, 2000)
    known = {tuple(k): v for k, v in zip(first.inputs[0].tolist(), first.labels[:, 1].tolist(), strict=True)}
    for key, value in zip(second.inputs[0].tolist(), second.labels[:, 1].tolist(), strict=True):
        assert known.get(tuple(key), value) == value


def test_facts_are_one_table_and_zipf_asks_the_first_most() -> None:
    answers = facts.table().tolist()
    for name in ("facts", "zipf-facts"):
        samples = TASKS[name].draw(0, 4000)
        keys = (samples.inputs[0][:, 0] * facts.BASE + samples.inputs[0][:, 1]).tolist()
        assert samples.labels[:, 1].tolist() == [answers[k] for k in keys]
        if name == "zipf-facts":
            share = keys.count(0) / len(keys)
            assert share == pytest.approx(1 / sum(k**-1.5 for k in range(1, facts.FACTS + 1)), abs=0.04)
            assert keys.count(0) > 2 * keys.count(1) > 4 * keys.count(4)


def test_chance_of_facts_is_the_best_constant() -> None:
    for name, weights in (("facts", [1 / facts.FACTS] * facts.FACTS), ("zipf-facts", facts.zipf().tolist())):
        by_answer = [0.0] * facts.ANSWERS
        for answer, weight in zip(facts.table().tolist(), weights, strict=True):
            by_answer[answer] += weight
        assert TASKS[name].chance == pytest.approx(max(by_answer))


@pytest.mark.parametrize("name", ["continue", "infill"])
def test_one_token_is_hidden_and_its_best_reader_is_enumerated(name: str) -> None:
    task, samples = TASKS[name], TASKS[name].draw(0, 20000)
    place, matrix = masked.PLACES[name], language.source_transition()
    hidden = samples.inputs[0] == masked.MASK
    assert hidden.nonzero()[:, 1].eq(place).all()
    assert torch.equal(hidden, samples.labels != IGNORED)
    tokens, label = samples.inputs[0], samples.labels[:, place]
    scores = matrix[tokens[:, place - 2]]
    if name == "infill":
        scores = scores * matrix[:, tokens[:, place + 2]].T
    # five standard errors of a share of 20,000
    error = 5 * 0.5 / 20000**0.5
    assert float((scores.argmax(dim=1) == label).double().mean()) == pytest.approx(task.best, abs=error)
    surprise = -(scores / scores.sum(dim=1, keepdim=True))[torch.arange(20000), label].log()
    assert float(surprise.mean()) == pytest.approx(task.loss_floor, abs=5 * float(surprise.std()) / 20000**0.5)
    assert float(torch.bincount(label).max()) / 20000 == pytest.approx(task.chance, abs=error)


def test_what_stands_behind_is_worth_something() -> None:
    left, both = (masked.best_of(8, both_sides=b) for b in (False, True))
    assert both > left + 0.1
    assert masked.least_loss(8, both_sides=True) < masked.least_loss(8, both_sides=False)
    assert masked.least_loss(12, both_sides=False) == pytest.approx(language.source_entropy(), abs=1e-3)


def test_translation_shifts_the_target_by_one() -> None:
    samples = TASKS["translate-reverse"].draw(0, 50)
    source, target = samples.inputs
    assert torch.equal(samples.labels, source.flip(1))
    assert torch.equal(target[:, 1:], samples.labels[:, :-1])
    assert (target[:, 0] == 8).all()
