"""Progress where there is no terminal."""

import time

from nearfar.utils.progress import Console, bars


def test_long_work_says_a_line_now_and_then(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with bars() as watch:
        tell = watch("embedding")
        for done in range(1, 101):
            clock[0] += 0.5
            tell(done * 10, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "embedding: 200 of 1,000, about 40.0 s left",
        "embedding: 400 of 1,000, about 30.0 s left",
        "embedding: 600 of 1,000, about 20.0 s left",
        "embedding: 800 of 1,000, about 10.0 s left",
    ]


def test_messages_are_lines_as_well(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    console = Console()
    for clock[0], done in ((8.0, 1), (11.0, 2), (12.0, 3)):
        console.show("training", done, 10, f"step {done}/10")
    console.say("stopped")
    clock[0] = 21.5  # too soon after the message
    console.show("training", 4, 10, "step 4/10")
    assert capsys.readouterr().err.splitlines() == ["training: step 2/10", "stopped"]


def test_quick_work_says_nothing(capsys):
    with bars() as watch:
        watch("decoding")(5, 10)
    assert capsys.readouterr().err == ""
