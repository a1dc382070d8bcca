"""The leaderboard: runs on one page, ranked where that is fair.

The page is a single file that asks nothing of the network. Its only script sorts tables; what comes from runs (names of
folders, losses, data) is text and never markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from nearfar.bench.comparison import outcomes as results
from nearfar.bench.comparison import ranking, tournament
from nearfar.bench.comparison.fairness import Verdict
from nearfar.bench.comparison.outcomes import Outcome
from nearfar.bench.comparison.packed import SUFFIX
from nearfar.bench.comparison.tables import UNFAIR, left_out_note
from nearfar.reports import leaderboard_sections as parts
from nearfar.reports import shell
from nearfar.utils.atomic import write_text
from nearfar.utils.progress import Watch

NAME = "leaderboard.html"


def html(
    outcomes: Iterable[Outcome],
    *,
    title: str = "Leaderboard",
    metric: str = "recall@1",
    anyway: bool = False,
    left_out: Sequence[str] = (),
    watch: Watch = lambda work: None,
) -> str:
    """Runs as a page.

    Args:
        outcomes: Finished runs; those that were not tested, such as trials of a tuning, are left out.
        title: What stands above it.
        metric: What losses are compared by, of the test classes.
        anyway: Rank what is unfair as well; the page then says UNFAIR wherever something is ranked.
        left_out: What to say of runs that are not here.
        watch: Told what work begins.
    """
    every = list(outcomes)
    tested = [run for run in every if run.has(metric)]
    if not tested:
        raise ValueError(f"there is nothing to show: none of {len(every)} runs has {metric!r} of the test classes")
    missing = len(every) - len(tested)
    left_out = [*left_out, *([f"{missing} runs have no {metric} of the test classes"] if missing else [])]
    judged = ranking.judge_experiments(tested)
    ranked = judged.fair or anyway
    stamp = UNFAIR if anyway and not judged.fair else ""
    tell = watch("comparing")
    if tell is not None:
        tell(0, 1)
    found = ranking.experiments(tested, metric=metric, anyway=anyway)
    found.sort(key=lambda one: (one.data, one.protocol, one.network, one.dim))
    colored = parts.colors(found)
    held = _standings(tested, [one.name for one in found], metric, judged) if ranked else None
    standings = held.rows if held else []
    names = list(held.scores) if held else []
    left = left_out_note(held) if held else ""
    left = f" {left[:1].upper()}{left[1:]}." if left else ""
    lead = " · ".join(
        dict.fromkeys([*(one.data for one in found), *(one.network for one in found), *(one.protocol for one in found)])
    )
    sections = [
        parts.figures(found, standings, metric, ranked),
        parts.verdict(judged, anyway, left_out),
        parts.tournament(standings, names, left, stamp),
        parts.overview(found, metric, stamp),
        parts.leaderboard(found, metric, anyway),
        parts.by_dim(found, metric, colored, stamp),
        parts.by_network(found, metric, colored, stamp),
        parts.by_setting(found, metric, stamp),
        parts.convergence(found, metric, colored, stamp),
    ]
    return shell.document(title, lead, sections)


def write(
    places: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    title: str | None = None,
    metric: str = "recall@1",
    anyway: bool = False,
    watch: Watch = lambda work: None,
) -> Path:
    """Write the page of some runs and say where it is.

    Args:
        places: Run folders, or folders that hold some.
        out: The file; leaderboard.html in the first place unless told.
        title: What stands above it; the name of the first place unless told.
        metric: What losses are compared by.
        anyway: Rank what is unfair as well.
        watch: Told what work begins.
    """
    if not places:
        raise ValueError("places is empty; needed are run folders, or folders that hold some")
    first = Path(places[0])
    outcomes = results.find(*places)
    packed = first.suffix == SUFFIX and first.is_file()
    file = Path(out) if out is not None else first.with_suffix(".html") if packed else first / NAME
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"out is {str(file)!r}; needed is a file in a folder that exists")
    waiting = [f"{folder} is not finished" for folder in results.unfinished(*places)]
    named = title or (first.stem if packed else first.absolute().name)
    page = html(outcomes, title=named, metric=metric, anyway=anyway, left_out=waiting, watch=watch)
    write_text(file, page)
    return file


def _standings(
    outcomes: Sequence[Outcome], order: Sequence[str], metric: str, verdict: Verdict
) -> ranking.Standings | None:
    """The tournament of the losses that all experiments have; None with fewer than two of them."""
    every = tournament.scores(outcomes, metric)
    scores = {name: every[name] for name in order if name in every}
    kept, left_out = tournament.shared(scores)
    if not kept or len(next(iter(kept.values()))) < 2:
        return None
    return ranking.Standings(metric, scores, tournament.tournament(kept), left_out, verdict, True)
