"""Fair comparison of losses: grids of runs, tuning, rankings and tournaments.

Example:
    >>> from nearfar import bench
    >>> [row.loss for row in bench.tournament({"one": {"triplet": 0.5, "nra": 0.7}}).rows]
    ['nra', 'triplet']
"""

from nearfar.bench import papers
from nearfar.bench.comparison.fairness import Verdict, differences, judge
from nearfar.bench.comparison.ranking import RankedLoss, Ranking, compare
from nearfar.bench.comparison.runs import find, read, repetitions, unfinished
from nearfar.bench.comparison.significance import Groups
from nearfar.bench.comparison.tournament import Tournament, tournament
from nearfar.bench.grid import Cell, Grid
from nearfar.bench.runner import plan, run
from nearfar.bench.tuning.tuner import tune
from nearfar.training.run.packed import pack
from nearfar.training.run.reader import Run

__all__ = [
    "Cell",
    "Grid",
    "Groups",
    "RankedLoss",
    "Ranking",
    "Run",
    "Tournament",
    "Verdict",
    "compare",
    "differences",
    "find",
    "judge",
    "pack",
    "papers",
    "plan",
    "read",
    "repetitions",
    "run",
    "tournament",
    "tune",
    "unfinished",
]
