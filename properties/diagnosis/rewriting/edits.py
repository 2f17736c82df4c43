"""The changes that one slip of the pen may need: a sign, an axis, an order, another name, a statement too many."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

SLIP, TERM, STATEMENT = 0, 1, 2
"""How much is changed: one token for another of its sort, or an order; a term or a call; a statement, or a decision."""

_OTHER = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "%", ast.Mod: "//",
          ast.BitAnd: "|", ast.BitOr: "&", ast.Pow: "*"}  # fmt: skip
_WRITTEN = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
            ast.BitAnd: "&", ast.BitOr: "|", ast.MatMult: "@"}  # fmt: skip
_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_TURNED = {ast.Lt: ">", ast.LtE: ">=", ast.Gt: "<", ast.GtE: "<="}
_PAIRS = (
    ("sum", "mean"), ("max", "min"), ("amax", "amin"), ("argmax", "argmin"), ("maximum", "minimum"), ("sin", "cos"),
    ("tril", "triu"), ("ones", "zeros"), ("ones_like", "zeros_like"), ("ones_", "zeros_"), ("new_ones", "new_zeros"),
    ("repeat", "repeat_interleave"), ("any", "all"), ("floor", "ceil"), ("logical_and", "logical_or"),
    ("rsqrt", "sqrt"), ("softmax", "log_softmax"), ("append", "extend"), ("rfind", "find"), ("add", "update"),
    ("empty", "zeros"), ("inf", "nan"),
)  # fmt: skip
_NAMES: dict[str, list[str]] = {}
for _one, _two in _PAIRS:
    _NAMES.setdefault(_one, []).append(_two)
    _NAMES.setdefault(_two, []).append(_one)
_REDUCED = (
    "sum",
    "mean",
    "amax",
    "amin",
    "all",
    "any",
    "softmax",
    "norm",
    "std",
    "var",
    "argmax",
    "cumsum",
    "max",
    "min",
)
_TOO_MANY = (
    "abs", "bool", "clamp", "cumsum", "detach", "dropout", "exp", "expm1", "flip", "float", "floor", "gelu", "half",
    "log", "log1p", "log_softmax", "masked_fill", "nan_to_num", "neg", "normalize", "relu", "roll", "round", "rsqrt",
    "sigmoid",
    "silu", "sort", "sqrt", "square", "sum", "mean", "t", "tanh", "to", "transpose", "tril", "triu", "type_as", "long",
)  # fmt: skip
"""Calls that may stand where none is meant."""
_COUNTED = (
    "arange", "clamp", "linspace", "max", "maximum", "min", "minimum", "narrow", "pad", "range", "roll", "select",
    "tril", "triu",
)  # fmt: skip
_OF_SHAPES = ("permute", "reshape", "view", "unflatten", "expand")
_AXES = ("dim", "axis")
_MOST_NAMES = 12
"""Names that are tried in the place of another."""


@dataclass(frozen=True)
class Edit:
    """One change of a file.

    Attributes:
        line: where it begins.
        start: of what is replaced, in bytes of the file.
        stop: behind it.
        new: what stands there then.
        rank: how much is changed.
        shown: the smallest expression or statement around it that a reader understands, before.
        mended: the same with the change.
        by_one: whether a number is one more, or one less.
    """

    line: int
    start: int
    stop: int
    new: str
    rank: int
    shown: str
    mended: str
    by_one: bool = False


class Source:
    """The text of a file, with places of its nodes."""

    def __init__(self, text: str) -> None:
        self.raw, self.starts = text.encode(), [0]
        for line in self.raw.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends, in bytes."""
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def __call__(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, stop = self.span(node)
        return self.raw[start:stop].decode()


class _Edits:
    """The changes of one function."""

    def __init__(self, source: Source, kinds: Mapping[str, tuple[Any, ...]]) -> None:
        self.source, self.kinds = source, kinds
        self.wholes: dict[str, set[str]] = {}
        self.statement: ast.stmt | None = None

    def put(self, node: ast.AST, new: str, rank: int) -> Edit:
        start, stop = self.source.span(node)
        around = self.statement if self.statement is not None else node
        first, last = self.source.span(around)
        if isinstance(around, ast.If | ast.While):
            last = self.source.span(around.test)[1]
        elif isinstance(around, ast.For | ast.With | ast.FunctionDef):
            first, last = start, stop
        raw = self.source.raw
        shown = raw[first:last].decode()
        mended = (raw[first:start] + new.encode() + raw[stop:last]).decode()
        return Edit(node.lineno, start, stop, new, rank, shown, mended)  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> Iterator[Edit]:
        text = self.source
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _WRITTEN:
                yield from self.of_operation(node, left, op, right)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                yield self.put(node, f"{text(left)} {_COMPARED[type(op)]} {text(right)}", SLIP)
                if type(op) in _TURNED:
                    yield self.put(node, f"{text(left)} {_TURNED[type(op)]} {text(right)}", SLIP)
                for one in (left, right):
                    if not isinstance(one, ast.Constant):
                        yield from self.by_one(one)
            case ast.UnaryOp(op=ast.Invert() | ast.Not() | ast.USub(), operand=operand):
                yield self.put(node, f"({text(operand)})", SLIP)
                if isinstance(operand, ast.Constant) and isinstance(operand.value, int):
                    yield self.put(node, f"(-{operand.value + 1})", SLIP)
                    if operand.value > 1:
                        yield self.put(node, f"(-{operand.value - 1})", SLIP)
            case ast.Constant(value=bool(value)):
                yield self.put(node, str(not value), SLIP)
            case ast.Constant(value=int(value)):
                yield replace(self.put(node, f"{value + 1}", SLIP), by_one=True)
                yield replace(self.put(node, f"({value - 1})", SLIP), by_one=True)
                if value > 1:
                    yield self.put(node, f"{2 * value}", SLIP)
                    yield self.put(node, f"({value} / 2)" if value % 2 else f"{value // 2}", SLIP)
            case ast.Constant(value=float(value)):
                for number in dict.fromkeys((2 * value, value / 2, 1 - value, 10 * value, value / 10)):
                    if number != value:
                        yield self.put(node, repr(number), SLIP)
            case ast.Call():
                yield from self.of_call(node)
            case ast.Name(id=name, ctx=ast.Load()) if name in self.kinds:
                yield from self.of_name(node, name)
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Load()) if f"self.{attr}" in self.kinds:
                yield from self.of_name(node, f"self.{attr}")
            case ast.Attribute(attr=attr, ctx=ast.Load()) if attr in _NAMES:
                start, stop = text.span(node)
                for name in _NAMES[attr]:
                    yield self.put(node, text.raw[start : stop - len(attr.encode())].decode() + name, SLIP)
            case ast.BoolOp(op=op, values=values):
                own, other = (" and ", " or ") if isinstance(op, ast.And) else (" or ", " and ")
                parts = [f"({text(v)})" for v in values]
                yield self.put(node, f"({other.join(parts)})", SLIP)
                for number in range(len(parts)):
                    yield self.put(node, f"({own.join(parts[:number] + parts[number + 1 :])})", TERM)
            case ast.IfExp(body=body, orelse=orelse):
                yield self.put(node, f"({text(body)})", TERM)
                yield self.put(node, f"({text(orelse)})", TERM)
            case ast.Tuple(elts=elts, ctx=ast.Load()) | ast.List(elts=elts, ctx=ast.Load()) if 2 <= len(elts) <= 6:
                yield from (self.exchanged(node, a, b) for a, b in combinations(elts, 2) if text(a) != text(b))
            case ast.Slice():
                for end in (node.lower, node.upper):
                    if end is not None and not isinstance(end, ast.Constant | ast.UnaryOp):
                        yield from self.by_one(end)
            case ast.Subscript(value=value, slice=index, ctx=ast.Load()) if isinstance(index, ast.Name | ast.BinOp):
                yield from self.by_one(index)

    def by_one(self, node: ast.expr) -> Iterator[Edit]:
        yield replace(self.put(node, f"({self.source(node)} + 1)", SLIP), by_one=True)
        yield replace(self.put(node, f"({self.source(node)} - 1)", SLIP), by_one=True)

    def of_operation(self, node: ast.BinOp, left: ast.expr, op: ast.operator, right: ast.expr) -> Iterator[Edit]:
        text, sign = self.source, _WRITTEN[type(op)]
        one, two = f"({text(left)})", f"({text(right)})"
        if type(op) in _OTHER:
            yield self.put(node, f"({one} {_OTHER[type(op)]} {two})", SLIP)
        if sign in ("-", "/", "//", "%", "@", "**"):
            yield self.put(node, f"({two} {sign} {one})", SLIP)
        if sign == "**" and not isinstance(right, ast.Constant):
            yield from self.by_one(right)
        if sign == "*":
            yield self.put(node, f"(2 * {one} {sign} {two})", TERM)
            yield self.put(node, f"(0.5 * {one} {sign} {two})", TERM)
        if sign in ("//",):
            yield self.put(node, f"(-(-{one} // {two}))", SLIP)
        yield self.put(node, one, TERM)
        if sign in ("+", "*", "&", "|", "@"):
            yield self.put(node, two, TERM)

    def of_call(self, node: ast.Call) -> Iterator[Edit]:
        text = self.source
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for a, b in combinations(plain[name in _OF_SHAPES : 6], 2):  # samples stay first
            if text(a) != text(b):
                yield self.exchanged(node, a, b)
        for a in plain:
            if isinstance(a, ast.Name | ast.Attribute | ast.BinOp | ast.Subscript) and name in _COUNTED:
                yield from self.by_one(a)
        function = text(node.func)
        args, named = [text(a) for a in node.args], [(k.arg, text(k.value)) for k in node.keywords]
        words = [f"{name}={value}" if name else f"**{value}" for name, value in named]
        for number, (word, value) in enumerate(named):
            if word in _AXES:
                for axis in ("-1", "-2", "-3", "0", "1", "2"):
                    if axis != value:
                        changed = [*words[:number], f"{word}={axis}", *words[number + 1 :]]
                        yield self.put(node, f"{function}({', '.join([*args, *changed])})", SLIP)
            elif word:
                rest = [w for n, w in enumerate(words) if n != number]
                yield self.put(node, f"{function}({', '.join([*args, *rest])})", TERM)
            if word in ("min", "max"):
                other = [*words[:number], f"{'max' if word == 'min' else 'min'}={value}", *words[number + 1 :]]
                yield self.put(node, f"{function}({', '.join([*args, *other])})", SLIP)
        if name in _REDUCED and not any(word in _AXES for word, _ in named):
            for axis in ("-1", "0", "1"):
                if not any(text(a) == axis for a in node.args):
                    yield self.put(node, f"{function}({', '.join([*args, *words, f'dim={axis}'])})", TERM)
        if name not in _TOO_MANY:
            return
        if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
            yield self.put(node, text(node.func.value), TERM)
        elif plain and plain[0] is node.args[0]:
            yield self.put(node, f"({args[0]})", TERM)

    def of_name(self, node: ast.AST, name: str) -> Iterator[Edit]:
        kind = self.kinds[name]
        if kind == (type(None),) or name == "self":
            return
        wholes = self.wholes.get(name, ())
        others = [o for o, its in self.kinds.items() if o != name and its == kind and o not in wholes]
        yield from (self.put(node, other, SLIP) for other in others[:_MOST_NAMES])

    def exchanged(self, node: ast.AST, a: ast.expr, b: ast.expr) -> Edit:
        raw, (start, stop) = self.source.raw, self.source.span(node)
        (a0, a1), (b0, b1) = self.source.span(a), self.source.span(b)
        new = raw[start:a0] + raw[b0:b1] + raw[a1:b0] + raw[a0:a1] + raw[b1:stop]
        return self.put(node, new.decode(), SLIP)

    def of_statements(self, body: list[ast.stmt]) -> Iterator[Edit]:
        simple = ast.Assign | ast.AugAssign | ast.Expr
        for number, statement in enumerate(body):
            self.statement = statement
            if not isinstance(statement, simple) or _is_text(statement):
                continue
            yield self.put(statement, "pass", STATEMENT)
            if number + 1 < len(body) and isinstance(after := body[number + 1], simple):
                yield self.swapped(statement, after)

    def swapped(self, one: ast.stmt, two: ast.stmt) -> Edit:
        raw, (a0, a1), (b0, b1) = self.source.raw, self.source.span(one), self.source.span(two)
        new = (raw[b0:b1] + raw[a1:b0] + raw[a0:a1]).decode()
        return Edit(one.lineno, a0, b1, new, SLIP, raw[a0:a1].decode(), "behind the next statement")


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "nn", "math", "self", "np", "functional", "super")


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def edits_of(
    source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, lines: set[int], kinds: Mapping[str, Any]
) -> Iterator[Edit]:
    """Yield the changes of a function, of what stands on certain lines, in the order of its statements.

    What leaves a variable without any use is none of them, nor what takes the whole in the place of one of its parts
    in a loop over these: it takes out what was meant to be there.

    Args:
        source: of the file.
        function: of it.
        lines: that a run went through.
        kinds: what its names stand for.
    """
    used = _used(source.raw[slice(*source.span(function))], function.col_offset)
    every = _Edits(source, kinds)
    every.wholes = _wholes(function)
    for edit in _edits(every, function, lines):
        start, stop = source.span(function)
        text = source.raw[start : edit.start] + edit.new.encode() + source.raw[edit.stop : stop]
        if used <= _used(text, function.col_offset) and not _idle(edit.mended) - _idle(edit.shown):
            yield edit


def _wholes(function: ast.AST) -> dict[str, set[str]]:
    """Return what each variable of a loop is a part of: the names in what is looped over, and in what made that."""
    made: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in _stored(node):
                made.setdefault(target, set()).update(_loaded(node.value))
    found: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension):
            over = _loaded(node.iter)
            over |= {name for one in over for name in made.get(one, ())}
            for target in _stored(node.target):
                found.setdefault(target, set()).update(over)
    return found


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _idle(text: str) -> set[str]:
    """Return what takes one thing twice where it should take two: `min(n, n)`, `n - n`, `n < n`."""
    text = textwrap.dedent(text).strip()
    try:
        tree = ast.parse(f"{text}: pass" if text.startswith(("if ", "while ")) else text)
    except SyntaxError:
        return set()
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and len(node.args) == 2
            and ast.unparse(node.func).endswith(("min", "max", "imum"))
        ):
            pairs.append((node.args[0], node.args[1]))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
            pairs.append((node.left, node.right))
        elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
            pairs.append((node.left, node.comparators[0]))
    return {ast.dump(one) for one, other in pairs if ast.dump(one) == ast.dump(other)}


def _used(text: bytes, indent: int) -> set[str]:
    """Return the names of variables that a function reads."""
    try:
        tree = ast.parse(textwrap.dedent(" " * indent + text.decode()))
    except SyntaxError:
        return set()
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    own = {n.id for n in nodes if isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | {n.id for n in nodes if n.id.isupper()}
    return {n.id for n in nodes if isinstance(n.ctx, ast.Load)} & own


def _edits(edits: _Edits, function: ast.FunctionDef | ast.AsyncFunctionDef, lines: set[int]) -> Iterator[Edit]:
    source = edits.source
    for statement in (n for n in ast.walk(function) if isinstance(n, ast.stmt) and n is not function):
        if not any(n in lines for n in range(statement.lineno, _end_of(statement) + 1)) or _is_text(statement):
            continue
        edits.statement = statement
        if isinstance(statement, ast.If):
            yield edits.put(statement.test, f"(not ({source(statement.test)}))", STATEMENT)
            yield edits.put(statement.test, "True", STATEMENT)
            yield edits.put(statement.test, "False", STATEMENT)
        for part in ast.iter_child_nodes(statement):
            if not isinstance(part, ast.stmt):
                for node in _expressions(part):
                    yield from edits.of(node)
    for holder in ast.walk(function):
        for body in (getattr(holder, "body", None), getattr(holder, "orelse", None)):
            if isinstance(body, list) and body and body[0].lineno in lines:
                yield from edits.of_statements(body)


def _end_of(statement: ast.stmt) -> int:
    inner = getattr(statement, "body", None)
    return inner[0].lineno - 1 if isinstance(inner, list) and inner else int(statement.end_lineno or statement.lineno)


def _expressions(part: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression; not those of annotations."""
    if isinstance(part, ast.arguments | ast.expr_context | ast.excepthandler):
        return
    yield part
    for inner in ast.iter_child_nodes(part):
        yield from _expressions(inner)
