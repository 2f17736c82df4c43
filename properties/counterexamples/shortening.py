"""Making a script short enough to be read: what stands for one use is put where it is used, long lines are broken."""

from __future__ import annotations

import ast
import io
import itertools
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence

from veriformer.properties.counterexamples.program import Line

WIDTH = 110
_ASSIGNED = re.compile(r"([a-z]+\d+) = (.+)")
_DECIDED = ("got = ", "expected = ")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def inlined(lines: Sequence[Line], verdict: Sequence[str]) -> list[str]:
    """Return the statements of a program and its verdict, what one statement alone uses put there.

    A call of the subject keeps its line, and nothing is moved past one, or past what changes a value in place.

    Args:
        lines: of the program.
        verdict: statements behind them.
    """
    texts, lines = _drawn_in_short(lines, verdict)
    texts += verdict
    movable = [not line.is_call and len(line.makes) == 1 for line in lines] + [False] * len(verdict)
    draws = [_draws(line) for line in lines] + [()] * len(verdict)
    made = [name for line in lines for name in line.makes]
    still = [
        (can or bool(drawn)) and made.count(line.makes[0]) == 1
        for can, drawn, line in zip(movable, draws, lines, strict=False)
    ]
    still += [text.startswith(_DECIDED) for text in verdict]
    place = len(texts) - 2
    while place >= 0:
        if (movable[place] or draws[place]) and (found := _ASSIGNED.fullmatch(texts[place])):
            name, value = found.groups()
            uses = [n for n, text in enumerate(texts) for _ in re.findall(rf"\b{name}\b", text)]
            last = uses[-1]
            # a draw may stand in the next statement, if that draws nothing itself
            apart = all(still[place + 1 : last]) if movable[place] else last == place + 1 and not draws[last]
            if len(uses) == 2 and apart and _takes(texts[last], value, name):
                texts[last] = _with(texts[last], name, value)
                movable[last] = movable[last] and not draws[place]
                draws[last] = draws[last] or draws[place]
                for row in (texts, movable, still, draws):
                    del row[place]
        place -= 1
    return texts


def merged(texts: Sequence[str]) -> list[str]:
    r"""Return statements, those that follow one another in the same mode under one line that says so.

    What makes a leaf of a graph of what was made the line before stands in that line.

    >>> merged(["with torch.no_grad():\n    a()", "with torch.no_grad():\n    b()"])
    ['with torch.no_grad():\n    a()\n    b()']
    """
    kept: list[str] = []
    for text in texts:
        mode, _, inner = text.partition("\n")
        name, _, change = text.partition(".")
        if change == "requires_grad_()" and kept and re.fullmatch(rf"{name} = [^\n]*\)", kept[-1]):
            kept[-1] += ".requires_grad_()"
            continue
        if kept and mode.startswith("with ") and kept[-1].startswith(f"{mode}\n    ") and inner.startswith("    "):
            kept[-1] += f"\n{inner}"
        else:
            kept.append(text)
    return kept


def _draws(line: Line) -> tuple[str, ...]:
    """Return the generators that a line draws from."""
    return tuple(name for name in line.makes if name.startswith("generator")) if len(line.makes) > 1 else ()


_SHORT = (
    ("draw_normal", "torch.randn", ", dtype=torch.float64"),
    ("draw_single", "torch.randn", ", dtype=torch.float32"),
    ("draw_whole", "torch.randint", ""),
    ("draw_uniform", "torch.rand", ""),
)


def _drawn_in_short(lines: Sequence[Line], verdict: Sequence[str]) -> tuple[list[str], list[Line]]:
    """Return a program in which many draws from one generator have a short name, and idle ones share a statement."""
    texts = [line.text for line in lines]
    makers = [n for n, text in enumerate(texts) if re.fullmatch(r"generator\d+ = torch\.Generator\(\).*", text)]
    if len(makers) != 1 or sum(map(bool, map(_draws, lines))) < _MANY:
        return texts, [*lines]
    generator = texts[makers[0]].split(" = ")[0]
    for name, function, also in _SHORT:
        call = re.compile(rf"{re.escape(function)}\(([^=]*), generator={generator}{re.escape(also)}\)")
        if sum(len(call.findall(text)) for text in texts) > 1:
            texts = [call.sub(rf"{name}(\1)", text) for text in texts]
            texts[makers[0]] += f"\n{name} = functools.partial({function}, generator={generator}{also})"
    kept: list[tuple[str, Line]] = []
    for number, (text, line) in enumerate(zip(texts, lines, strict=True)):
        found = _ASSIGNED.fullmatch(text)
        is_idle = found is not None and _draws(line) and not _is_used(found[1], [*texts[number + 1 :], *verdict])
        if not is_idle or found is None:
            kept.append((text, line))
        elif kept and kept[-1][0].startswith(_IDLE):
            kept[-1] = (f"{kept[-1][0]}\n{found[2]}", line)
        else:
            kept.append((f"{_IDLE}\n{found[2]}", line))
    kept = [(_idle(text) if text.startswith(_IDLE) else text, line) for text, line in kept]
    return [text for text, _ in kept], [line for _, line in kept]


_MANY = 4  # draws, from which on their names are worth a line
_IDLE = "# drawn, and not used here"
_OF_SIZE = re.compile(r"(draw_normal|draw_single|draw_uniform)\((\(.*\))\)")


def _idle(text: str) -> str:
    """Return one statement for draws that nothing uses, which are told one a line below what is said of them."""
    told, *draws = text.split("\n")
    sizes = [found for draw in draws if (found := _OF_SIZE.fullmatch(draw))]
    if len(sizes) < len(draws) or len({found[1] for found in sizes}) > 1 or len(draws) == 1:
        return f"_ = [{', '.join(_runs(draws))}]  {told}"
    shapes = [found[2] for found in sizes]
    many = f"range({len(shapes)})" if len({*shapes}) == 1 else f"[{', '.join(_sizes(shapes))}]"
    drawn = f"{sizes[0][1]}({shapes[0] if len({*shapes}) == 1 else 'size'})"
    return f"_ = [{drawn} for {'_' if len({*shapes}) == 1 else 'size'} in {many}]  {told}"


def _runs(draws: Sequence[str]) -> Iterator[str]:
    """Yield draws, several of one kind in a row as one expression."""
    for kind, run in itertools.groupby(draws, lambda draw: (found := _OF_SIZE.fullmatch(draw)) and found[1]):
        several = [*run]
        if not kind or len(several) < _MANY:
            yield from several
        else:
            sizes = _sizes(draw.removeprefix(f"{kind}(").removesuffix(")") for draw in several)
            yield f"*({kind}(size) for size in [{', '.join(sizes)}])"


def _sizes(shapes: Iterable[str]) -> Iterator[str]:
    """Yield the sizes of draws, the same one in a row as a multiple of it."""
    for size, run in itertools.groupby(shapes):
        count = len([*run])
        yield size if count == 1 else f"*[{size}] * {count}"


def _is_used(name: str, texts: Sequence[str]) -> bool:
    return any(re.search(rf"\b{name}\b", text) for text in texts)


def _with(text: str, name: str, value: str) -> str:
    return re.sub(rf"\b{name}\b", lambda _: value, text)


def _takes(behind: str, value: str, name: str) -> bool:
    """Whether a statement stays the same with a value in place of its name, and stays readable."""
    if "\n" in behind or "lambda" in behind or "lambda" in value or behind.startswith(f"{name}"):
        return False
    room = 3 * WIDTH if behind.startswith(_DECIDED) else WIDTH  # what is compared may take three lines
    return len(behind) + len(value) <= room and not re.fullmatch(r"-?[\d.e+-]+|\w+", value)


def wrapped(source: str, width: int = WIDTH) -> str:
    """Return source with its long lines broken at commas inside of brackets; what cannot be broken stays."""
    return "\n".join(_broken(line, width) if len(line) > width else line for line in source.split("\n"))


def _broken(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    places, depth = [], 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.lstrip()).readline):
            depth += _BRACKETS.get(token.string, 0) if token.type == tokenize.OP else 0
            if token.type == tokenize.OP and token.string == "," and depth:
                places.append(token.end[1])
    except (tokenize.TokenError, IndentationError):  # a piece of a statement
        return line
    text, start, pieces = line.lstrip(), 0, []
    while len(text) - start > width - len(indent) - 4:
        fitting = [p for p in places if start < p <= start + width - len(indent) - 4]
        beyond = [p for p in places if p > start]
        if not beyond:
            break
        end = fitting[-1] if fitting else beyond[0]
        pieces.append(text[start:end].strip())
        start = end
    pieces.append(text[start:].strip())
    return f"\n{indent}    ".join([indent + pieces[0], *pieces[1:]])


def lean(source: str) -> str:
    r"""Return the source of a function or class without its docstrings and empty lines.

    >>> print(lean('def f(x):\n    "It is x."\n\n    return x'))
    def f(x):
        return x
    """
    lines, texts, gone = source.split("\n"), set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # an empty line of a text is no empty line
            texts |= {*range(node.lineno, node.end_lineno or node.lineno)}
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            kept = [" " * first.col_offset + "pass"] if len(node.body) == 1 else []
            for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[number] = ""
                gone.add(number)
            lines[first.lineno - 1] = "".join(kept)
    return "\n".join(line for number, line in enumerate(lines) if line.strip() or number in texts - gone)


def untyped(source: str) -> str:
    r"""Return source without the types of what functions take and return; fields of a class keep theirs.

    >>> print(untyped("def f(x: int, y: float = 1.0) -> int:\n    return x"))
    def f(x, y = 1.0):
        return x
    """
    lines = source.split("\n")
    for start, end in sorted(
        _typed(ast.parse(source), lines), reverse=True
    ):  # from the end: places before stay what they are
        (first, left), (last, right) = start, end
        head = lines[first - 1].encode()[:left].decode()
        lines[first - 1 : last] = [head + lines[last - 1].encode()[right:].decode()]
    return _heads_in_one_line("\n".join(lines))


def _heads_in_one_line(source: str) -> str:
    """Return source in which a function that takes no types any more says in one line what it takes."""
    lines = source.split("\n")
    for node in sorted(ast.walk(ast.parse(source)), key=lambda node: -getattr(node, "lineno", 0)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.body[0].lineno == node.lineno:
            continue
        head = lines[node.lineno - 1 : node.body[0].lineno - 1]
        joined = " ".join(line.strip() for line in head).replace("( ", "(").replace(", )", ")")
        if len(head) > 1 and "#" not in joined and '"' not in joined and "'" not in joined:
            lines[node.lineno - 1 : node.body[0].lineno - 1] = [" " * node.col_offset + joined]
    return "\n".join(lines)


def _typed(tree: ast.AST, lines: Sequence[str]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield where each type of an argument or of what is returned begins and ends, its colon or arrow included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield (node.lineno, node.col_offset + len(node.arg.encode())), _end(node.annotation)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            before = lines[node.returns.lineno - 1].encode()[: node.returns.col_offset]
            if (arrow := before.rfind(b"->")) >= 0:
                yield (node.returns.lineno, len(before[:arrow].rstrip())), _end(node.returns)


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def paragraphs(*texts: str) -> str:
    """Return paragraphs as the docstring of a script, broken at its width."""
    told = "\n\n".join(
        textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) for text in texts if text
    )
    quotes = '"' if told.endswith('"') else '"""'  # which would end it
    told = told.replace("\\", "\\\\").replace(quotes, '\\"' * len(quotes))
    return f'"""{told}"""'
