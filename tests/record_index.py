"""Write down what `list`, `explain` and `ablate --list` say: python tests/record_index.py."""

import json
from pathlib import Path

from veriformer.cli.index import RECORD, live

if __name__ == "__main__":
    place = Path(__file__).parent.parent / "cli" / RECORD
    place.write_text(json.dumps(live(), indent=1) + "\n", encoding="utf-8")
