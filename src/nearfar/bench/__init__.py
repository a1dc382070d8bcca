"""Fair comparison of losses: grids of runs, tuning, rankings and tournaments.

Example:
    >>> from nearfar import bench
    >>> [row.loss for row in bench.tournament({"one": {"triplet": 0.5, "nra": 0.7}}).rows]
    ['nra', 'triplet']
"""

from nearfar.bench import papers
from nearfar.bench.comparison.fairness import Verdict, differences, judge
from nearfar.bench.comparison.outcomes import Outcome, find, read, repetitions, unfinished
from nearfar.bench.comparison.packed import pack
from nearfar.bench.comparison.ranking import Ranking, Row, compare
from nearfar.bench.comparison.significance import Groups
from nearfar.bench.comparison.tournament import Tournament, tournament
from nearfar.bench.grid import Cell, Grid
from nearfar.bench.runner import plan, run

__all__ = [
    "Cell",
    "Grid",
    "Groups",
    "Outcome",
    "Ranking",
    "Row",
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
    "unfinished",
]
