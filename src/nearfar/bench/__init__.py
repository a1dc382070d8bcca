"""Comparing losses fairly: protocols, grids, tuning, tournaments.

>>> from nearfar import bench
>>> [row.loss for row in bench.tournament({"one": {"triplet": 0.5, "nra": 0.7}})]
['nra', 'triplet']
"""

from nearfar.bench.fairness import Verdict, differences, judge
from nearfar.bench.results import Outcome, find, read, repetitions, unfinished
from nearfar.bench.tournaments import Standing, tournament

__all__ = [
    "Outcome",
    "Standing",
    "Verdict",
    "differences",
    "find",
    "judge",
    "read",
    "repetitions",
    "tournament",
    "unfinished",
]
