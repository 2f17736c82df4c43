"""Running a standalone script in this process: an interpreter of its own, with torch, would cost seconds a script."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import traceback

from veriformer.properties.bench.isolation import isolated

VIOLATED, HOLDS = (1, "-> violated"), (0, "-> holds")


def decision(script: str) -> tuple[object, str]:
    """Run a script and return its exit status with the words that its last line ends in; or what it raised."""
    printed, path, finders, modules = io.StringIO(), sys.path[:], sys.meta_path[:], dict(sys.modules)
    hook = sys.excepthook
    try:
        with isolated(), contextlib.redirect_stdout(printed):
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__", "__file__": "script.py"})
    except SystemExit as end:
        last = printed.getvalue().strip().splitlines()[-1]
        return int(end.code or 0), last[last.find("->") :]
    except Exception:
        return "raised", traceback.format_exc()
    finally:
        sys.path[:], sys.meta_path[:], sys.excepthook = path, finders, hook
        for name in [n for n in sys.modules if n not in modules]:
            del sys.modules[name]
        sys.modules.update(modules)
    return "ended", printed.getvalue()


def foreign_imports(script: str) -> list[str]:
    """Return the modules that a script imports and must not: of this package any but the faults and the reference.

    What it tries to import, and does without, does not count.
    """
    tree = ast.parse(script)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Try)]
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [
        n for n in names
        if n.startswith("veriformer") and not n.startswith(("veriformer.tests.mutants", "veriformer.reference"))
    ]  # fmt: skip
