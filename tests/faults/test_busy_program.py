"""The program that measures a busy server, for a moment."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from busy import API, END_SECONDS, build, measure


def test_a_server_is_measured_and_ends_while_it_is_busy(tmp_path):
    index, runs = build(tmp_path, 2000)
    row = measure(index, runs, ("POST", f"{API}/search/id/{{id}}"), 0.5)
    assert set(row["answers"]) == {200}
    assert row["end seconds"] < END_SECONDS
    assert row["search busy p99"] > 0
