"""Changes of a source file that nobody chose: the operators of mutation testing, one change at a time.

Only what a class or a function of the model says is changed; its wrapping as a `Subject` stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_OTHER = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
          ast.BitAnd: "|", ast.BitOr: "&"}  # fmt: skip
_WRITTEN = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
            ast.BitAnd: "&", ast.BitOr: "|"}  # fmt: skip
_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_MODULES = ("torch", "F", "nn", "math", "self", "np")
_WRAPPING = ("build", "forward", "embed", "cache", "generate", "weights")


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        line: where it begins.
        operator: what was done: "+ -> -", "drop statement".
        old: what stood there.
        new: what stands there.
        text: of the whole file.
    """

    line: int
    operator: str
    old: str
    new: str
    text: str


class _Source:
    def __init__(self, text: str) -> None:
        self.raw, self.starts = text.encode(), [0]
        for line in self.raw.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def _span(self, node: ast.AST) -> slice:
        lines, columns = (node.lineno, node.end_lineno), (node.col_offset, node.end_col_offset)  # type: ignore[attr-defined]
        return slice(*(self.starts[line - 1] + column for line, column in zip(lines, columns, strict=True)))

    def __call__(self, node: ast.AST) -> str:
        return self.raw[self._span(node)].decode()

    def put(self, node: ast.AST, new: str, operator: str) -> Mutant:
        span = self._span(node)
        text = (self.raw[: span.start] + new.encode() + self.raw[span.stop :]).decode()
        return Mutant(node.lineno, operator, self(node), new, text)  # type: ignore[attr-defined]


def mutants(text: str) -> Iterator[Mutant]:
    """Yield every change of a file; each gives a file that can be parsed."""
    source = _Source(text)
    for top in ast.parse(text).body:
        is_wrapping = isinstance(top, ast.FunctionDef) and (
            top.name in _WRAPPING or any(isinstance(n, ast.Name) and n.id == "Subject" for n in ast.walk(top))
        )
        if not isinstance(top, ast.ClassDef | ast.FunctionDef) or is_wrapping:
            continue
        for function in (n for n in ast.walk(top) if isinstance(n, ast.FunctionDef)):
            names = _variables(function)
            for node in (n for statement in function.body for n in ast.walk(statement)):
                yield from _of_node(source, node, names)


def _variables(function: ast.FunctionDef) -> list[str]:
    used = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
    own = {a.arg for a in function.args.args} | {n.id for n in used if isinstance(n.ctx, ast.Store)}
    return sorted(({n.id for n in used if isinstance(n.ctx, ast.Load)} & own) - {"self", "cls"})


def _of_node(source: _Source, node: ast.AST, names: list[str]) -> Iterator[Mutant]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _WRITTEN:
            sign, other = _WRITTEN[type(op)], _OTHER[type(op)]
            yield source.put(node, f"({source(left)} {other} {source(right)})", f"{sign} -> {other}")
            if sign in "+-*/":
                yield source.put(node, f"({source(left)})", f"drop right of {sign}")
                if sign in "+*":
                    yield source.put(node, f"({source(right)})", f"drop left of {sign}")
                else:
                    yield source.put(node, f"({source(right)} {sign} {source(left)})", f"swap {sign}")
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            yield source.put(node, f"{source(left)} {_COMPARED[type(op)]} {source(right)}", "compare")
        case ast.UnaryOp(op=ast.Invert() | ast.Not() | ast.USub(), operand=operand):
            yield source.put(node, f"({source(operand)})", "drop sign")
        case ast.Constant(value=bool(value)):
            yield source.put(node, str(not value), "flip bool")
        case ast.Constant(value=int(value)):
            yield source.put(node, str(value + 1), "int + 1")
            yield source.put(node, f"({value - 1})", "int - 1")
        case ast.Constant(value=float(value)):
            yield source.put(node, repr(2 * value or 1.0), "float * 2")
        case ast.Call():
            yield from _of_call(source, node)
        case ast.Name(id=name, ctx=ast.Load()) if name in names:
            yield from (source.put(node, other, "other variable") for other in names if other != name)
        case ast.IfExp(body=body, orelse=orelse):
            yield source.put(node, f"({source(body)})", "always then")
            yield source.put(node, f"({source(orelse)})", "always else")
        case ast.If(test=test):
            yield source.put(test, f"(not ({source(test)}))", "negate if")
        case ast.Expr(value=ast.Constant()):
            pass
        case ast.Assign() | ast.AugAssign() | ast.Expr():
            yield source.put(node, "pass", "drop statement")


def _of_call(source: _Source, node: ast.Call) -> Iterator[Mutant]:
    positional = [source(a) for a in node.args]
    named = [(k.arg, f"{k.arg}={source(k.value)}" if k.arg else f"**{source(k.value)}") for k in node.keywords]
    function = source(node.func)
    is_method = isinstance(node.func, ast.Attribute) and not (
        isinstance(node.func.value, ast.Name) and node.func.value.id in _MODULES
    )
    if is_method:
        yield source.put(node, source(node.func.value), f"drop .{node.func.attr}()")  # type: ignore[attr-defined]
    elif node.args and not isinstance(node.args[0], ast.Starred):
        yield source.put(node, f"({positional[0]})", "call -> its first argument")
    if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        swapped = [positional[1], positional[0], *positional[2:], *(text for _, text in named)]
        yield source.put(node, f"{function}({', '.join(swapped)})", "swap arguments")
    for name, text in named:
        if name:
            rest = [*positional, *(other for _, other in named if other != text)]
            yield source.put(node, f"{function}({', '.join(rest)})", f"drop {name}=")
