"""Fair comparison of losses: grids of runs, tuning, rankings and tournaments.

Example:
    >>> from nearfar import bench
    >>> [row.loss for row in bench.tournament({"one": {"triplet": 0.5, "nra": 0.7}})]
    ['nra', 'triplet']
"""

from nearfar.bench import papers
from nearfar.bench.comparison.fairness import Verdict, differences, judge
from nearfar.bench.comparison.loss_ranking import LossRanking, Standings, compare, standings
from nearfar.bench.comparison.outcomes import Outcome, find, read, repetitions, unfinished
from nearfar.bench.comparison.tournament import Standing, tournament

__all__ = [
    "LossRanking",
    "Outcome",
    "Standing",
    "Standings",
    "Verdict",
    "compare",
    "differences",
    "find",
    "judge",
    "papers",
    "read",
    "repetitions",
    "standings",
    "tournament",
    "unfinished",
]
