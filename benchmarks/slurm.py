"""What `--cluster submitit:slurm` gives beside this machine's own processes, a worker killed on the way: a table.

python benchmarks/slurm.py > reports/gallery/slurm.md

Wants a Slurm that takes jobs from here (`sinfo`), and a folder that its nodes see (the working one). Each command runs
here and there; the first worker that starts there is killed (SIGKILL) once it has begun to work.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

COMMIT = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
VERIFORMER = [sys.executable, "-P", "-c", "from veriformer.cli.main import main; main()"]
STABLE = ("--stable", "--format", "json")
COMMANDS = {
    "check": ("check", "torch:TransformerEncoder", "--profile", "quick", *STABLE),
    "sweep": ("sweep", "reference:softmax", "torch:softmax", "torch:LayerNorm", "--out", "out", *STABLE),
    "mutants": ("mutants", "--only", "SC01", "--only", "SC04", "--only", "SC05", "--out", "out", *STABLE),
    "ablate": ("ablate", "norm", "--seeds", "2", "--task", "precede", "--variant", "RMSNorm", "--out", "out",
               "--format", "json"),
}  # fmt: skip
"""One of each command that takes `--cluster`; small, since what is tried is the way there and back."""

_MACHINES_OWN = {"seconds", "date", "command", "device_name", "machine", "processor", "peak", "tokens_per_second"}
"""Keys of an ablation's JSON that tell of a run rather than of what was trained."""

_UNDERWAY = 3.0
"""Seconds after which a job that Slurm lists as running has begun to judge or to train."""


def here(arguments: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with this machine's processes."""
    return subprocess.run([*VERIFORMER, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def there(arguments: tuple[str, ...], folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a command with Slurm's, and kill the first worker; also say what was killed."""
    command = [*VERIFORMER, *arguments, "--cluster", "submitit:slurm"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        killed = kill_first(run)
        out, errors = run.communicate()
    return subprocess.CompletedProcess(command, run.returncode, out, errors), killed


def kill_first(run: subprocess.Popen[str]) -> str:
    """Kill the first process of submitit that works; returns what was killed."""
    while run.poll() is None:
        for process in psutil.process_iter(["cmdline"]):
            if "submitit.core._submit" in (process.info["cmdline"] or []):
                time.sleep(_UNDERWAY)
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                return "one worker"
        time.sleep(0.1)
    return "none: it was over before"


def same(ours: str, theirs: str, command: str) -> bool:
    """Return whether two outputs agree: to the byte, or in every number that was trained."""
    if command != "ablate":
        return ours == theirs
    return without_own(json.loads(ours)) == without_own(json.loads(theirs))


def without_own(value: object) -> object:
    """Return JSON without what belongs to a machine and a moment."""
    if isinstance(value, dict):
        return {key: without_own(inner) for key, inner in value.items() if key not in _MACHINES_OWN}
    return [without_own(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    """Run and print; the exit status is 1 where anything differs."""
    console = Console(stderr=True)
    if shutil.which("sinfo") is None:
        sys.exit("no Slurm here (`sinfo` is not found); run this where jobs can be handed to one")
    version = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    commit = subprocess.run(COMMIT, capture_output=True, text=True, check=False).stdout.strip()
    lines, agree = [], True
    for command, arguments in COMMANDS.items():
        with tempfile.TemporaryDirectory(dir=".") as ours, tempfile.TemporaryDirectory(dir=".") as theirs:
            console.print(f"{command}: here")
            first = here(arguments, Path(ours))
            console.print(f"{command}: on Slurm")
            second, killed = there(arguments, Path(theirs))
        equal = first.returncode == second.returncode and same(first.stdout, second.stdout, command)
        agree &= equal
        if not equal:
            console.print(second.stderr[-2000:], markup=False)
        what = "every number" if command == "ablate" else "every byte"
        shown = " ".join(a for a in arguments if a not in ("--out", "out"))
        lines.append(f"| `veriformer {shown}` | {second.returncode} | {killed} | {what if equal else 'DIFFERS'} |")
    print("# On Slurm\n")
    print(f"`python benchmarks/slurm.py`, commit {commit}, {version}, Python {platform.python_version()}. Each command")
    print("runs with this machine's processes and with `--cluster submitit:slurm`, where a worker is killed.\n")
    print("| command | exit | killed | the same as here |\n| --- | --- | --- | --- |")
    print("\n".join(lines))
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
