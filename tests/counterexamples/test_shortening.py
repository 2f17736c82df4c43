"""Scripts are made short: values put where they are used, long lines broken; what they compute stays the same."""

from __future__ import annotations

import ast
import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from veriformer.properties.bench.pool import WEIGHT_SEED
from veriformer.properties.bench.redraw import redraw_weights
from veriformer.properties.counterexamples.literals import of_tensor
from veriformer.properties.counterexamples.program import Line
from veriformer.properties.counterexamples.shortening import (
    WIDTH,
    inlined,
    lean,
    merged,
    paragraphs,
    untyped,
    wrapped,
)
from veriformer.properties.counterexamples.source import making_of, redrawing_of


def lines(*texts: str, calls: str = "") -> list[Line]:
    return [Line.of(t, [t.split(" = ")[0].split("[")[0]], is_call=bool(calls) and calls in t) for t in texts]


def test_what_is_used_once_stands_where_it_is_used() -> None:
    program = lines("x1 = torch.ones(3)", "t2 = x1.abs()", "t10 = t2.sum()", "t3 = x1.neg()")
    assert inlined(program, ["got = t10", "expected = t3", "violated = bool(got)"]) == [
        "x1 = torch.ones(3)", "got = x1.abs().sum()", "expected = x1.neg()", "violated = bool(got)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "texts",
    [
        ("x1 = torch.ones(3)", "t2 = x1[0].clone()", "x1[0] = torch.zeros(1)", "got = t2"),
        ("x1 = torch.ones(3)", "t2 = x1.abs()", "x1 = forward(x1)", "got = t2"),
        ("x1 = torch.ones(3)", "t2 = x1.abs()", "with torch.no_grad():\n    x1.add_(t2)"),
        ("x1 = torch.ones(3)", "t2 = x1.abs()", "t3 = apply(lambda: t2, x1)"),
    ],
    ids=["changed in place", "across a call", "into another mode", "asked for later"],
)
def test_what_would_be_another_value_elsewhere_stays(texts: tuple[str, ...]) -> None:
    assert inlined(lines(*texts, calls="forward"), []) == list(texts)


def test_long_lines_are_broken_at_commas_inside_of_brackets() -> None:
    source = f"x = torch.tensor([{', '.join(map(str, range(90)))}], dtype=torch.int64)"
    broken = wrapped(source)
    assert max(map(len, broken.splitlines())) <= WIDTH
    assert ast.dump(ast.parse(broken)) == ast.dump(ast.parse(source))
    text = f"print({'a, ' * 60!r})"
    assert wrapped(text) == text, "a text is no list"


def test_docstrings_go_and_texts_stay() -> None:
    source = (
        'def f(x):\n    """It is x."""\n\n    y = """a\n\nb"""\n\n    return x, y\n\n\nclass A:\n    """Nothing."""'
    )
    names: dict[str, object] = {}
    exec(lean(source), names)
    assert names["f"](1) == (1, "a\n\nb")  # type: ignore[operator]
    assert '"""It is' not in lean(source)
    assert lean(source).endswith("class A:\n    pass")


@pytest.mark.parametrize("text", ['says """ and \\', 'says "so"', 'x\\"', 'a"""', '"'])
def test_the_words_of_a_docstring_cannot_end_it(text: str) -> None:
    assert ast.literal_eval(paragraphs(text)) == text


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
@pytest.mark.parametrize("shift", [-1, 0, 2])
def test_a_causal_mask_is_written_as_one(dtype: torch.dtype, shift: int) -> None:
    for mask in (torch.ones(5, 7).tril(shift), torch.ones(5, 7).triu(shift)):
        value = mask.to(dtype)
        (source,) = of_tensor(value, [], torch.device("cpu"))
        assert len(source) < 70
        assert torch.equal(eval(source), value)
        assert eval(source).dtype == dtype


def test_weights_are_drawn_as_ever() -> None:
    """Recorded cases name a seed: the same seed gives the same weights in every release."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, padding_idx=0), torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    redraw_weights(model, 5)
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    table = drawn(3, 2)
    table[0] = 0
    torch.testing.assert_close(model[0].weight, table.float(), rtol=0, atol=0)
    torch.testing.assert_close(model[1].weight, (drawn(2, 2) / 2**0.5).float(), rtol=0, atol=0)
    drawn(2)  # the bias starts at random and is moved
    torch.testing.assert_close(model[2].weight, (1 + 0.25 * drawn(2).clamp(-2, 2)).float(), rtol=0, atol=0)
    torch.testing.assert_close(model[2].bias, (0.25 * drawn(2)).float(), rtol=0, atol=0)


def drawn(name: str, call: str) -> Line:
    return Line.of(f"{name} = {call}", [name, "generator1"])


def test_draws_stay_in_their_order() -> None:
    normal = "torch.randn((2, 3), generator=generator1, dtype=torch.float64)"
    whole = "torch.randint(0, 9, (2, 3), generator=generator1)"
    program = [
        *lines("generator1 = torch.Generator().manual_seed(0)"),
        drawn("t1", normal), drawn("t2", whole), drawn("t3", normal),  # the first two are not used
        *lines("t4 = t3.to(torch.float32)"),
        drawn("t5", normal), drawn("t6", whole),
        *lines("t7 = t5 - t6"), *lines("t8 = t4.sum()"),
    ]  # fmt: skip
    short = inlined(program, ["got = t7 + t8"])
    assert short == [
        "generator1 = torch.Generator().manual_seed(0)\n"
        "draw_normal = functools.partial(torch.randn, generator=generator1, dtype=torch.float64)\n"
        "draw_whole = functools.partial(torch.randint, generator=generator1)",
        "_ = [draw_normal((2, 3)), draw_whole(0, 9, (2, 3))]  # drawn, and not used here",
        "t3 = draw_normal((2, 3))",
        "t5 = draw_normal((2, 3))",
        "got = t5 - draw_whole(0, 9, (2, 3)) + t3.to(torch.float32).sum()",
    ]
    whole_program: dict[str, object] = {"torch": torch, "functools": functools}
    exec("\n".join([*(line.text for line in program), "got = t7 + t8"]), whole_program)
    shortened: dict[str, object] = {"torch": torch, "functools": functools}
    exec("\n".join(short), shortened)
    assert torch.equal(shortened["got"], whole_program["got"])  # type: ignore[arg-type]


def test_a_model_is_drawn_anew_by_the_short_source_as_by_the_whole_one() -> None:
    parts = [nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.MultiheadAttention(6, 2), nn.GRU(4, 3)]
    model = nn.Sequential(*parts)
    other = copy.deepcopy(model)
    space: dict[str, Any] = {"torch": torch}
    exec(redrawing_of([model]), space)
    redraw_weights(model, WEIGHT_SEED)
    space["redrawn_to_unit_gain"](other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    padded, frozen = nn.Embedding(3, 2, padding_idx=0), nn.Linear(2, 2).requires_grad_(False)
    assert redrawing_of([padded]) == redrawing_of([frozen]) == "", "these need the whole function"


@pytest.mark.parametrize("words", ["", ", redrawn=False", ", device='cpu'", ", seed=3"])
@pytest.mark.parametrize("redrawn", [True, False])
@pytest.mark.parametrize("in_short", [True, False])
@pytest.mark.parametrize("models", [[nn.Linear(2, 2)], [object()]])
def test_what_makes_a_model_takes_what_it_is_given(
    words: str, redrawn: bool, in_short: bool, models: list[Any]
) -> None:
    call = f"made(None, torch.float64{words})"
    if words == ", redrawn=False" and not redrawn:
        return
    space: dict[str, Any] = {"torch": torch, "build": lambda c: nn.Linear(2, 2), "redraw_weights": redraw_weights}
    if in_short:
        del space["redraw_weights"]
        exec(redrawing_of(models), space)
    exec(making_of(call, models, redrawn=redrawn, in_short=in_short), space)
    model = eval(call, space)
    assert model.weight.dtype == torch.float64
    assert not model.training


def test_a_function_without_types_says_in_one_line_what_it_takes() -> None:
    source = "def f(\n    x: int,\n    *,\n    y: float = 1.0,\n) -> int:\n    return x"
    assert untyped(source) == "def f(x, *, y = 1.0):\n    return x"


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (["(2, 3)"] * 3, "_ = [draw_normal((2, 3)) for _ in range(3)]  # drawn, and not used here"),
        (["(2, 3)", "(4,)"], "_ = [draw_normal(size) for size in [(2, 3), (4,)]]  # drawn, and not used here"),
    ],
)
def test_idle_draws_of_one_kind_are_told_by_their_sizes(sizes: list[str], told: str) -> None:
    normal = "torch.randn({}, generator=generator1, dtype=torch.float64)"
    made = [drawn(f"t{n}", normal.format(size)) for n, size in enumerate([*sizes, "(5,)", "(6,)", "(7,)"], 1)]
    got = f"got = [{', '.join(line.makes[0] for line in made[-3:])}]"
    start = lines("generator1 = torch.Generator().manual_seed(0)")
    short = inlined([*start, *made], [got])
    assert short[1] == told
    spaces: list[dict[str, Any]] = [{"torch": torch, "functools": functools} for _ in range(2)]
    for space, texts in zip(spaces, (short, [*(line.text for line in (*start, *made)), got]), strict=True):
        exec("\n".join(texts), space)
    assert all(torch.equal(a, b) for a, b in zip(spaces[0]["got"], spaces[1]["got"], strict=True))


def test_a_leaf_is_made_one_in_its_line() -> None:
    assert merged(["x1 = torch.ones(3)", "x1.requires_grad_()"]) == ["x1 = torch.ones(3).requires_grad_()"]
    assert merged(["x1 = torch.ones(3)", "x2.requires_grad_()"]) == ["x1 = torch.ones(3)", "x2.requires_grad_()"]


def test_statements_in_one_mode_stand_together() -> None:
    off, on = "with torch.no_grad():\n    {}", "with torch.enable_grad():\n    {}"
    texts = [off.format("a()"), off.format("b()"), on.format("c()"), "d()", off.format("e()")]
    assert merged(texts) == [off.format("a()\n    b()"), on.format("c()"), "d()", off.format("e()")]


def test_types_go_where_functions_have_them() -> None:
    source = (
        "class A:\n    x: int = 1\n"
        "    def f(self, é: 'str', *a: int, k: float = 1.0) -> dict[str, int]:\n        return {é: k}"
    )
    assert untyped(source) == "class A:\n    x: int = 1\n    def f(self, é, *a, k = 1.0):\n        return {é: k}"
    ast.parse(untyped(source))


ROW = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("value", "longest"),
    [
        (ROW.repeat(5, 1, 1), 230),
        (ROW.double(), 230),
        (ROW.double() / 3, 330),
        (torch.tensor([[1, 2], [1, 2], [1, 2]]), 70),
        (ROW.repeat(2, 1, 1).requires_grad_(), 230),
        (torch.tensor([[0.0, -0.0, 1.5, 2.0, float("inf")]], dtype=torch.float64), 90),
        (torch.full((2, 3), float("nan")), 200),
        (torch.tensor([[0.0, 1.0, 2.0], [-0.0, 1.0, 2.0]]), 90),
    ],
    ids=["alike", "halves", "wide", "whole", "leaf", "signs", "nan", "zeros"],
)
def test_numbers_are_told_once_and_come_back(value: torch.Tensor, longest: int) -> None:
    (source,) = of_tensor(value.detach(), [], torch.device("cpu"))
    again = eval(source)
    assert len(source) <= longest
    assert again.dtype == value.dtype
    assert again.is_contiguous()
    torch.testing.assert_close(again, value.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(again.signbit(), value.detach().signbit())


def test_what_is_another_rounded_is_told_so() -> None:
    wide = ROW.double() / 3
    assert of_tensor(wide.float(), [("x1", wide)], torch.device("cpu")) == ["x1.to(torch.float32)"]
    (source,) = of_tensor(wide, [("x1", wide.float())], torch.device("cpu"))
    assert source.startswith("torch.tensor("), "the rounded one does not tell the whole one"
