"""Progress where there is no terminal."""

import time

from nearfar.utils.progress import bars


def test_long_work_says_a_line_now_and_then(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with bars() as watch:
        tell = watch("embedding")
        assert tell is not None
        for done in range(1, 101):
            clock[0] += 1.0
            tell(done * 10, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "embedding: 200 of 1,000, about 1 min 20 s left",
        "embedding: 400 of 1,000, about 1 min 00 s left",
        "embedding: 600 of 1,000, about 40.0 s left",
        "embedding: 800 of 1,000, about 20.0 s left",
    ]


def test_quick_work_says_nothing(capsys):
    with bars() as watch:
        tell = watch("decoding")
        assert tell is not None
        tell(5, 10)
    assert capsys.readouterr().err == ""
