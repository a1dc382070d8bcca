"""The other benchmarks on two revisions of nearfar, taking turns in one run.

    python benchmarks/revisions.py v0.1.0 losses                     # that revision against the working tree
    python benchmarks/revisions.py HEAD~1 search serve --rounds 5
    python benchmarks/revisions.py HEAD~1 losses -- --sizes 180      # options of the benchmark itself
    python benchmarks/revisions.py HEAD~9 search --same-script -- --adds 3000   # measured in no older script

Each benchmark script runs in its own process, once per revision and round, with the script of that revision or, with
``--same-script``, with that of the working tree. Rows are matched by their descriptive columns. The table shows the
median of the other revision, that of the working tree and their ratio: below 1 means that the working tree is faster
or smaller. Of rates (``requests/s``) the inverse is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUICK = {
    "losses": ["--sizes", "180,1024", "--budget", "0.5"],
    "training": ["--seconds", "5"],
    "search": ["--size", "20000", "--only", "exact", "--budget", "5"],
    "serve": ["--seconds", "15", "--kills", "1"],
}
COSTS = ("ms", "CPU ms", "build s", "add ms", "p50 ms", "p99 ms", "compact s", "MB before", "MB after")
RATES = ("queries/s", "requests/s", "adds/s")


def measure(tree: Path, scripts: Path, script: str, options: list[str]) -> dict[tuple[str, ...], dict[str, float]]:
    """Run a benchmark script of one tree with the package of another; times and sizes by row and column."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(scripts / f"benchmarks/{script}.py"), *options, "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if not out.is_file():
            raise SystemExit(f"{script} of {tree} failed:\n{done.stderr[-2000:]}")
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        key = tuple(str(value) for name, value in row.items() if isinstance(value, str) or name in ("batch", "vectors"))
        times = {name: float(row[name]) for name in COSTS if row.get(name)}
        times |= {name: 1 / float(row[name]) for name in RATES if row.get(name)}
        if times:
            found[key] = times
    return found


def main() -> None:
    """Parse the command line, measure and print the table."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    own, passed = words[:end], words[end + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what the working tree is compared with: a commit, tag or branch")
    parser.add_argument("scripts", nargs="+", choices=sorted(QUICK))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--same-script", action="store_true", help="run the script of the working tree on both")
    parser.add_argument("--out", help="also write the rows as JSON")
    given = parser.parse_args(own)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(before), given.revision], cwd=ROOT, check=True)
        try:
            for script in given.scripts:
                options = passed or QUICK[script]
                seen: dict[tuple[str, ...], dict[str, tuple[list[float], list[float]]]] = {}
                for number in range(given.rounds):
                    sides = [(0, before), (1, ROOT)]
                    for side, tree in sides if number % 2 == 0 else reversed(sides):
                        for key, times in measure(tree, ROOT if given.same_script else tree, script, options).items():
                            for name, value in times.items():
                                seen.setdefault(key, {}).setdefault(name, ([], []))[side].append(value)
                    print(f"{script}: round {number + 1} of {given.rounds}", file=sys.stderr)
                for key, columns in seen.items():
                    for name, (old, new) in columns.items():
                        if old and new:
                            was, now = statistics.median(old), statistics.median(new)
                            about = {"benchmark": script, "row": ", ".join(key), "column": name}
                            rows.append({**about, "before": was, "now": now, "ratio": now / was})
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT, check=True)
    for row in rows:
        numbers = f"{row['before']:10.4g} {row['now']:10.4g} {row['ratio']:.3f}"
        print(f"{row['benchmark']:10} {row['row']:60} {row['column']:12} {numbers}")
    for script in given.scripts:
        ratios = [row["ratio"] for row in rows if row["benchmark"] == script]
        print(f"{script}: median ratio {statistics.median(ratios):.3f}, worst {max(ratios):.3f} of {len(ratios)}")
    if given.out:
        Path(given.out).write_text(json.dumps({"revision": given.revision, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
