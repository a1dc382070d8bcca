"""How often the comparison of losses errs, simulated with the variance of real results.

    python benchmarks/significance.py                   # the tables of docs/benchmarks/significance.md, 10 minutes
    python benchmarks/significance.py --repeats 100     # a quick look

Results of equal losses are simulated: value = class effect + seed effect + rest, each with the covariance between
losses of packed results. Class effects and the rest are drawn from the real ones, with all losses together; seed
effects are normal, as there are few seeds to draw from. Every mean difference is 0, so a significant one is a false
positive.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from nearfar.bench import find
from nearfar.bench.comparison.ranking import by_label
from nearfar.bench.comparison.significance import ALPHA, METRICS, MIN_SEEDS, by_class_and_seed, holm, pair_means, stack
from nearfar.metrics.intervals import CrossedMeans, Values, crossed_means, mean_squares

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "cub.zip"
CLASSES, SEEDS = (5, 10, 20, 100), (1, 3, 5, 10)
DRAWS = 1000  # of a bootstrap
SHIFT = 0.02  # the difference whose discovery is the power
MORE = 10.0  # times the real variance between seeds, to see what happens


@dataclass(frozen=True)
class Components:
    """Effects of equal losses to draw from.

    Args:
        means: [losses], the real means, for the intervals of each loss.
        classes: [classes, losses], effects of classes.
        seeds: [losses, losses], a factor that gives normal effects of seeds their covariance.
        rest: [classes × seeds, losses], what is left.
    """

    means: Values
    classes: Values
    seeds: Values
    rest: Values

    def draw(self, classes: int, seeds: int, rng: np.random.Generator, more: float = 1.0) -> Values:
        """[classes, seeds, losses] of equal losses; ``more`` multiplies the variance between seeds."""
        by_class = self.classes[rng.integers(len(self.classes), size=classes)]
        by_seed = np.sqrt(more) * rng.standard_normal((seeds, len(self.seeds))) @ self.seeds.T
        return by_class[:, None] + by_seed + self.rest[rng.integers(len(self.rest), size=(classes, seeds))]

    def of_pairs(self) -> Values:
        """[3], mean variance of the difference of two losses: between classes, between seeds, and the rest."""
        covariances = (np.cov(self.classes.T), self.seeds @ self.seeds.T, np.cov(self.rest.T))
        pairs = list(combinations(range(len(self.seeds)), 2))
        return np.array([np.mean([c[i, i] + c[j, j] - 2 * c[i, j] for i, j in pairs]) for c in covariances])


def components(table: Values) -> Components:
    """Estimate the components of real results, [classes, seeds, losses], by the mean squares of the three effects."""
    classes, seeds, losses = table.shape
    mean = table.mean(axis=(0, 1))
    by_class, by_seed = table.mean(axis=1) - mean, table.mean(axis=0) - mean
    rest = (table - by_class[:, None] - by_seed - mean).reshape(-1, losses)
    of_rest = rest.T @ rest / ((classes - 1) * (seeds - 1))
    with_rest = by_class.T @ by_class / (classes - 1)  # means of classes vary by the rest as well
    shrink = _root(with_rest - of_rest / seeds) @ np.linalg.pinv(_root(with_rest))
    of_seed = by_seed.T @ by_seed / (seeds - 1) - of_rest / classes
    lost = classes * seeds / ((classes - 1) * (seeds - 1))  # degrees of freedom
    return Components(mean, by_class @ shrink.T, _root(of_seed), rest * np.sqrt(lost))


def _root(covariance: Values) -> Values:
    """Symmetric square root, without the negative part that an estimate may have."""
    values, vectors = np.linalg.eigh(covariance)
    root: Values = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    return root


def bootstrap_p(differences: Values, rng: np.random.Generator, *, crossed: bool) -> Values:
    """p-values of the means of [classes, seeds, pairs] by draws of classes, or of classes and of seeds."""
    classes, seeds, pairs = differences.shape
    by_class = rng.multinomial(classes, np.full(classes, 1 / classes), size=DRAWS) / classes
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS) / seeds
    if not crossed:
        by_seed = np.full((DRAWS, seeds), 1 / seeds)
    drawn = np.einsum("dsp,ds->dp", (by_class @ differences.reshape(classes, -1)).reshape(DRAWS, seeds, pairs), by_seed)
    aside = np.minimum((drawn <= 0).sum(axis=0), (drawn >= 0).sum(axis=0))
    return np.minimum(1.0, 2 * (aside + 1) / (DRAWS + 1))


def simulate(found: Components, classes: int, seeds: int, repeats: int, more: float = 1.0) -> dict[str, float]:
    """Error rates of one design in percent; without those of p-values if there are too few seeds."""
    rng = np.random.default_rng([classes, seeds])
    counts: dict[str, list[float]] = {}

    def count(name: str, wrong: Values | bool) -> None:
        counts.setdefault(name, []).append(100 * float(np.mean(wrong)))

    for turn in range(repeats):
        table = found.draw(classes, seeds, rng, more)
        low, high = crossed_means(mean_squares(table + found.means)).share_intervals()
        count("interval", (low > found.means) | (high < found.means))
        if turn < repeats // 10 and more == 1:  # bootstraps take long
            pairs = np.array(list(combinations(range(table.shape[2]), 2)))
            differences = table[:, :, pairs[:, 0]] - table[:, :, pairs[:, 1]]
            count("classes alone", bootstrap_p(differences, rng, crossed=False) < ALPHA)
            count("crossed", bootstrap_p(differences, rng, crossed=True) < ALPHA)
        if seeds >= MIN_SEEDS:
            means = pair_means(table)
            p = means.p_values()
            count("pair", p < ALPHA)
            count("any pair", bool((holm(p) < ALPHA).any()))
            two = crossed_means(mean_squares(table[:, :, :1] - table[:, :, 1:2]))
            count("two losses", two.p_values() < ALPHA)
            count("power", CrossedMeans(means.mean + SHIFT, means.error, means.freedom).p_values() < ALPHA)
    return {name: float(np.mean(each)) for name, each in counts.items()}


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="packed results with several seeds")
    parser.add_argument("--repeats", type=int, default=1000, help="simulated comparisons for each design")
    options = parser.parse_args()
    runs = [run for run in find(options.results) if not run.is_baseline]
    groups = by_label(runs)
    columns = ("pair", "two losses", "any pair", "power", "interval", "classes alone", "crossed")
    for metric in METRICS:
        real = stack({loss: by_class_and_seed(own, metric) for loss, own in groups.items()})
        # The same function under two names would be one loss twice.
        _, first = np.unique(real.reshape(-1, len(groups)), axis=1, return_index=True)
        found = components(real[:, :, np.sort(first)])
        parts = np.sqrt(found.of_pairs()) * 100
        print(
            f"\n### {metric}\n\nStandard deviations of a difference, in points: between classes {parts[0]:.1f}, ",
            end="",
        )
        print(f"between seeds {parts[1]:.2f}, rest {parts[2]:.1f}.\n", flush=True)
        print(f"| classes | seeds | {' | '.join(columns)} | any pair, seeds × {MORE:g} |\n|--:|--:|{'--:|' * 8}")
        for classes in CLASSES:
            for seeds in SEEDS:
                rates = simulate(found, classes, seeds, options.repeats)
                worse = simulate(found, classes, seeds, options.repeats // 2, MORE) if seeds >= MIN_SEEDS else {}
                numbers = [*(rates.get(name) for name in columns), worse.get("any pair")]
                cells = ["no p" if each is None else f"{each:.1f}" for each in numbers]
                print(f"| {classes} | {seeds} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
