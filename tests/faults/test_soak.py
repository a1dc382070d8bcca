"""The soak test itself, for a moment: a server under load is killed, and nothing is lost."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from soak import Record, soak


def test_a_server_under_mixed_load_is_killed_and_loses_nothing():
    record = soak(3, 0, pause=(2.0, 3.0))
    assert record.counts["kills"] >= 1
    assert record.counts["checks"] >= 2
    assert record.counts["search"]
    assert record.counts["add"]
    assert min(record.memory) > 50


def test_a_lost_item_is_noticed():
    record = Record(names={3: "a.png"}, gone={5})
    record.check({3: "a.png"})
    with pytest.raises(AssertionError, match=r"item 3 was acknowledged as a\.png, and is lost"):
        record.check({})
    with pytest.raises(AssertionError, match="removed items are back"):
        record.check({3: "a.png", 5: "b.png"})
