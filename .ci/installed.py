"""What must work where nothing but the package is installed; run in an empty environment, beside an example or two."""

import re
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent


def run(*words: str, status: int = 0, says: str = "", program: str = "veriformer") -> None:
    """Run a command; end unless it ends with this status and says this."""
    done = subprocess.run([str(BIN / program), *words], capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    if done.returncode != status or not re.search(says, told):
        sys.exit(f"{program} {' '.join(words)}: status {done.returncode}, wanted {status} and {says!r}\n{told}")
    print(f"{program} {' '.join(words)}: {status}", flush=True)


run("--version", says="version 0")
run("list", says="properties")
run("explain", "causality.no-future-influence", says="formula")
run("ablate", "--list", says="positions")
run("ablate", "positions", status=3, says=r"needs matplotlib and pebble.*veriformer\[ablate\]")
run("check", "torch:LayerNorm", "--profile", "quick", "--out", "report", says="0 fail|[0-9]+ pass of")
run("check", "leaky_gpt.py:mine", "--profile", "quick", "--only", "causality", status=1, says="one step ahead|mask")
run("mutants", "--only", "NM01", says="NM01|1 of 1|killed")
run("install", "--quiet", "--no-deps", "./plugin", program="pip")
run("check", "house:norm", "--only", "house.odd", "--profile", "quick", says="house-norms 0.1")
Path("test_mine.py").write_text(
    "from torch import nn\nfrom veriformer.properties import parametrize\n"
    'test_norm = parametrize(nn.LayerNorm, profile="quick")\n',
    encoding="utf-8",
)
run("-q", "test_mine.py", says="passed", program="pytest")
for script in sorted(Path(".veriformer").glob("*.py")):
    run(str(script), status=1, says="-> violated", program="python")
