"""Running a standalone script in this process: an interpreter of its own, with torch, would cost seconds a script."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback

from veriformer.properties.bench.isolation import isolated

VIOLATED, HOLDS = (1, "-> violated"), (0, "-> holds")


def decision(script: str) -> tuple[object, str]:
    """Run a script and return its exit status with the words that its last line ends in; or what it raised."""
    printed, path, modules = io.StringIO(), sys.path[:], dict(sys.modules)
    try:
        with isolated(), contextlib.redirect_stdout(printed):
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        last = printed.getvalue().strip().splitlines()[-1]
        return int(end.code or 0), last[last.find("->") :]
    except Exception:
        return "raised", traceback.format_exc()
    finally:
        sys.path[:] = path
        for name in [n for n in sys.modules if n not in modules]:
            del sys.modules[name]
        sys.modules.update(modules)
    return "ended", printed.getvalue()
