"""Run the reproduction of every finding again, and say which prints something else than its page does.

    python benchmarks/findings.py [NAME...]

To be started in an environment that has the libraries; a reproduction whose library is missing, or of another release,
says so. Numbers count as the same if they agree to two digits, or are both rounding.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from pathlib import Path

PAGES = Path(__file__).parent.parent / "reports" / "gallery" / "findings"
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|\d+e-\d+")


def main() -> int:
    """Run the reproductions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args().names
    changed = 0
    for page in sorted(PAGES.glob("*.md")):
        if page.name == "README.md" or (chosen and page.stem not in chosen):
            continue
        code, printed = parts(page.read_text(encoding="utf-8"))
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        lines = [line for line in found.stdout.splitlines() if not line.startswith("[transformers]")]
        same = agree("\n".join(lines).strip(), printed)
        changed += not same
        print(f"{page.stem}: {'as on the page' if same else 'something else'}")
        if not same:
            print("\n".join(f"    {line}" for line in (lines or found.stderr.splitlines()[-2:])))
    return int(bool(changed))


def parts(page: str) -> tuple[str, str]:
    """Return the reproduction of a page and what the page says that it prints."""
    blocks = re.findall(r"```(?:python)?\n(.*?)\n```", page, flags=re.DOTALL)
    return blocks[0], blocks[1].strip()


def agree(got: str, wanted: str) -> bool:
    """Whether two outputs say the same, numbers up to two digits."""
    if _NUMBER.sub("#", got) != _NUMBER.sub("#", wanted):
        return False
    pairs = zip(_NUMBER.findall(got), _NUMBER.findall(wanted), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=1e-5) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
