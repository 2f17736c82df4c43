"""Systematic mutants: the source of the reference with one operator, constant, axis, name or line changed.

Every place of every function where something can be wrong by one, negated, dropped, doubled or taken from the
neighbour gives one mutant. Its id names the function and the change, not the line, so that it survives edits elsewhere.
To say that a mutant is equivalent, add its id with a proof in one sentence to `equivalent.toml`.
"""

from __future__ import annotations

import ast
import copy
import importlib
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from veriformer import reference
from veriformer.properties.subject.subject import Subject

_ADAPTERS = "veriformer.properties.adapters"
JUDGED_ON: Mapping[str, tuple[str, ...]] = {
    "rotary": ("rotary",),
    "positions": ("sinusoidal", "learned", "decoder-sinusoidal"),
    "normalization": ("layer-norm", "rms-norm"),
    "feedforward": ("feed-forward", "swiglu"),
    "pooling": ("classifier-cls", "classifier-mean", "classifier-max", "classifier-weighted"),
    "cache": ("decoder-rotary", "decoder-sinusoidal"),
    "schedules": ("noam", "linear", "cosine", "parameter-groups"),
    "objectives": ("next-token-loss", "loss", "smoothed-loss", "masking"),
    "position_bias": ("alibi", "t5", "t5-causal", "encoder-alibi"),
    "attention": ("softmax", "attention", "multi-head", "grouped-heads", "cross-attention", "layer-causal",
                  "decoder-alibi"),
    "blocks": ("layer-depth", "layer-pre", "layer-post", "layer-causal", "encoder-decoder"),
    "generation": ("decoder-rotary",),
    "initialization": ("encoder", "decoder-gpt2"),
    "model": ("encoder", "decoder-sinusoidal", "decoder-t5", "decoder-tied", "encoder-decoder-tied", "classifier-cls",
              "classifier-positions"),
    "tokenization": ("byte-pairs", "wordpiece", "unigram"),
}  # fmt: skip
"""Module of the reference to the shipped subjects that are made of it. Not here: `config` (it validates), `counting`
(it is itself the formula that parameters are compared with)."""

_OPERATORS: Mapping[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,), ast.Pow: (ast.Mult,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,),
    ast.Lt: (ast.LtE,), ast.LtE: (ast.Lt,), ast.Gt: (ast.GtE,), ast.GtE: (ast.Gt,), ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}  # fmt: skip
_NEIGHBOURS: Mapping[str, str] = {
    "q_proj": "k_proj", "k_proj": "v_proj", "v_proj": "k_proj", "query": "key", "key": "value", "value": "key",
    "cos": "sin", "sin": "cos", "amax": "amin", "amin": "amax", "tril": "triu", "triu": "tril", "min": "max",
    "max": "min", "ones": "zeros", "zeros": "ones", "ones_like": "zeros_like", "zeros_like": "ones_like",
    "num_heads": "num_key_value_heads", "num_key_value_heads": "num_heads", "repeat_interleave": "repeat",
    "sum": "mean", "mean": "sum", "log": "exp", "source": "target", "source_mask": "target_mask",
    "target_mask": "source_mask", "d_model": "d_ff", "d_ff": "d_model", "any": "all", "all": "any",
    "attention_norm": "feed_forward_norm", "feed_forward_norm": "attention_norm",
}  # fmt: skip


Place = tuple[tuple[str, int | None], ...]
"""How a node is reached from a function: fields, and places in their lists."""


_TYPES = ("annotation", "returns", "decorator_list", "args")  # no code that runs; defaults are given by the callers


@dataclass(frozen=True)
class SourceMutant:
    """One change to one place of the reference.

    Attributes:
        id: `attention.softmax: amax becomes amin #1`.
        module: of the reference, `attention`.
        path: names of the classes and the function around the place.
        place: in that function.
        node: what stands there instead.
    """

    id: str
    module: str
    path: tuple[str, ...]
    place: Place
    node: ast.AST | None

    @property
    def source(self) -> str:
        """The whole changed source."""
        tree = ast.parse((_folder() / f"{self.module}.py").read_text(encoding="utf-8"))
        _replace(_at(tree, self.path), self.place, self.node)
        return ast.unparse(ast.fix_missing_locations(tree))

    @property
    def title(self) -> str:
        """What was changed, in words."""
        return self.id.partition(": ")[2].rpartition(" #")[0]

    @property
    def equivalent(self) -> str:
        """The proof that it computes the same, or ""."""
        return equivalents().get(self.id, "")

    def load(self) -> Iterator[Subject]:
        """Put the changed module in the place of the right one, in this process, and return what is made of it."""
        broken = f"{reference.__name__}.{self.module}"
        for name in [n for n in sys.modules if n.startswith((f"{reference.__name__}.", _ADAPTERS))]:
            del sys.modules[name]
        module = ModuleType(broken)
        module.__file__ = str(_folder() / f"{self.module}.py")
        sys.modules[broken] = module
        exec(compile(self.source, f"<{self.id}>", "exec"), module.__dict__)
        wanted = [f"reference:{name}" for name in JUDGED_ON[self.module]]
        load = importlib.import_module("veriformer.properties.targets").load
        load(wanted[0])  # a model that cannot be built shows when it is judged; a module that cannot be imported, here
        return (subject for target in wanted for subject in load(target))


def _folder() -> Path:
    return Path(next(iter(reference.__path__)))


@cache
def equivalents() -> Mapping[str, str]:
    """Return the proofs of equivalence by id."""
    return tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text(encoding="utf-8"))


@cache
def all_source_mutants() -> Mapping[str, SourceMutant]:
    """Return every mutant of the reference's source by id."""
    return {m.id: m for module in JUDGED_ON for m in _mutants(module)}


def _mutants(module: str) -> Iterator[SourceMutant]:
    tree = ast.parse((_folder() / f"{module}.py").read_text(encoding="utf-8"))
    seen: Counter[str] = Counter()
    for function, path in _functions(tree, ()):
        for place, (change, node) in _changes(function):
            label = f"{module}.{'.'.join(path)}: {change}"
            seen[label] += 1
            yield SourceMutant(f"{label} #{seen[label]}", module, path, place, node)


def _functions(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[ast.FunctionDef, tuple[str, ...]]]:
    for child in getattr(node, "body", []):
        if isinstance(child, ast.FunctionDef):
            yield child, (*path, child.name)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, (*path, child.name))


def _at(tree: ast.AST, path: tuple[str, ...]) -> ast.FunctionDef:
    for name in path:
        tree = next(c for c in getattr(tree, "body", []) if getattr(c, "name", None) == name)
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _changes(function: ast.FunctionDef) -> Iterator[tuple[Place, tuple[str, ast.AST | None]]]:
    """Yield every place of a function with every change there: in words, and the node that stands there then."""
    for place, node in _walk(function, ()):
        for change in _of(node):
            yield place, change


def _walk(node: ast.AST, place: Place) -> Iterator[tuple[Place, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and isinstance(
            node, ast.FunctionDef | ast.AnnAssign
        ):
            continue  # types are not code that runs; defaults are given by the callers
        children = (
            [(None, value)] if isinstance(value, ast.AST) else list(enumerate(value)) if isinstance(value, list) else []
        )
        for number, child in children:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr) or _is_docstring(child):
                continue  # messages are not what is judged here
            here = (*place, (name, number))
            yield here, child
            yield from _walk(child, here)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _of(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    words = ast.unparse(node)[:60]
    if isinstance(node, ast.BinOp | ast.Compare | ast.BoolOp):
        yield from _operators(node, words)
    elif isinstance(node, ast.UnaryOp):
        yield f"{words} loses its sign", node.operand
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Name) and node.id in _NEIGHBOURS and isinstance(node.ctx, ast.Load):
        yield f"{node.id} becomes {_NEIGHBOURS[node.id]}", ast.Name(_NEIGHBOURS[node.id], node.ctx)
    elif isinstance(node, ast.Attribute) and node.attr in _NEIGHBOURS and isinstance(node.ctx, ast.Load):
        name = _NEIGHBOURS[node.attr]
        yield f"{node.attr} becomes {name}", ast.Attribute(node.value, name, node.ctx)
    elif isinstance(node, ast.IfExp):
        yield f"{words}: branches swapped", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.If):
        yield (
            f"if {ast.unparse(node.test)[:50]} negated",
            ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse),
        )
        yield f"if {ast.unparse(node.test)[:50]} never", ast.If(ast.Constant(False), node.body, node.orelse)
    elif isinstance(node, ast.Call) and len(node.args) >= 2 and not _symmetric(node):
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield f"{words}: arguments swapped", ast.Call(node.func, swapped, node.keywords)
    elif isinstance(node, ast.Expr | ast.AugAssign):
        yield f"{words} dropped", ast.Pass()


def _symmetric(call: ast.Call) -> bool:
    """Whether swapping the first two arguments changes nothing, or is no call of that kind."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name == "transpose" or any(isinstance(a, ast.Starred) for a in call.args)


def _operators(node: ast.BinOp | ast.Compare | ast.BoolOp, words: str) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare):
        for other in _OPERATORS.get(type(node.ops[0]), ()):
            yield (
                f"{words}: {other.__name__}",
                ast.Compare(node.left, [_as_operator(other), *node.ops[1:]], node.comparators),
            )
        return
    for other in _OPERATORS.get(type(node.op), ()):
        changed = copy.copy(node)
        changed.op = other()  # type: ignore[assignment]
        yield f"{words}: {other.__name__}", changed
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow):
        yield f"{words}: left alone", node.left
        yield f"{words}: right alone", node.right
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield f"{words}: doubled", ast.BinOp(ast.Constant(2), ast.Mult(), node)


def _as_operator(kind: type[ast.AST]) -> ast.cmpop:
    made = kind()
    assert isinstance(made, ast.cmpop)
    return made


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield f"{value} becomes {not value}", ast.Constant(not value)
    elif isinstance(value, int):
        yield f"{value} becomes {value + 1}", ast.Constant(value + 1)
        yield f"{value} becomes {value - 1}", ast.Constant(value - 1)
    elif isinstance(value, float):
        yield (f"{value:g} doubled", ast.Constant(2 * value)) if value else ("0.0 becomes 1", ast.Constant(1.0))


def _replace(function: ast.FunctionDef, place: Place, node: ast.AST | None) -> None:
    parent: ast.AST = function
    for name, number in place[:-1]:
        value = getattr(parent, name)
        parent = value if number is None else value[number]
    name, number = place[-1]
    if number is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[number] = node
