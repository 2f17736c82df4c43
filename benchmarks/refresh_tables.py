"""Make the tables of published pages again, each by the command that stands in the comment before it.

    python benchmarks/refresh_tables.py [WORD]     only the commands that contain WORD

A table stands between `<!-- made by: COMMAND -->` and `<!-- end -->`; `python` and `veriformer` are those of this
interpreter's environment.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("reports/gallery/libraries.md", "reports/gallery/times.md")
BLOCK = re.compile(r"(<!-- made by: (?P<command>[^>]*?) -->\n)(?P<body>.*?)(\n?<!-- end -->)", re.DOTALL)


def main() -> None:
    """Run the commands and write the pages."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        made = BLOCK.sub(lambda block: _made(block) if wanted in block["command"] else block[0], text)
        (ROOT / page).write_text(made, encoding="utf-8")


def _made(block: re.Match[str]) -> str:
    folder = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"]}
    print(block["command"], flush=True)
    done = subprocess.run(
        shlex.split(block["command"]), cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return f"{block[1]}{done.stdout.strip()}\n<!-- end -->"


if __name__ == "__main__":
    main()
