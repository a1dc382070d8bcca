"""What a recipe wants to know of a model: its parts embedded, measured, and written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar import metrics
from nearfar.data.store.store import Store
from nearfar.training.evaluation import measure as evaluation
from nearfar.training.evaluation.measure import Embedded
from nearfar.training.loop.builder import Parts
from nearfar.training.run.folder import finite
from nearfar.utils.atomic import write_tensors

Queries = dict[str, Tensor]  # metrics by name, of each query [n]


class Judge:
    """Evaluates the model of a run as its recipe says.

    Args:
        parts: What the recipe built.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts, self.recipe = parts, parts.recipe

    @property
    def tested(self) -> list[str]:
        """The parts of the test: "test", or "query" and "gallery"; none where the recipe leaves the test out."""
        if not self.recipe.evaluation.test:
            return []
        return [part for part in self.parts.rows if part not in ("train", "validation")]

    @property
    def watched(self) -> list[str]:
        """The parts that are measured while a training is under way: the test only where nothing validates."""
        return [*(["validation"] if len(self.parts.rows["validation"]) else self.tested), *self._learned]

    @property
    def wanted(self) -> list[str]:
        """All parts that are measured in the end."""
        return ["validation", *self.tested, *self._learned]

    @property
    def _learned(self) -> list[str]:
        return ["train"] if self.recipe.evaluation.train_recall else []

    def embedded(self, names: Sequence[str] | None = None) -> dict[str, Embedded]:
        """The embeddings of parts, those that are measured unless told; a part without rows is left out."""
        training = self.recipe.training
        return {
            name: evaluation.embed(
                self.parts.model,
                self.parts.eval_loader,
                self.parts.rows[name],
                batch_size=self.recipe.evaluation.batch_size,
                precision=training.precision,
                channels_last=training.channels_last,
            )
            for name in (self.wanted if names is None else names)
            if len(self.parts.rows[name])
        }

    def measured(self, found: Mapping[str, Embedded]) -> tuple[dict[str, Any], Queries | None]:
        """The metrics of each part, as JSON has them; and those of each query of the test, where that is a part."""
        section = self.recipe.evaluation
        values = evaluation.measure(
            found, ks=section.ks, measure=section.measure, clustering=section.clustering, per_query=True
        )
        queries = {part: each.pop("per_query", None) for part, each in values.items()}
        plain: dict[str, Any] = finite(values)
        return plain, queries.get("test")

    def give_means(self) -> None:
        """Tell a sampler of hard classes where classes are now."""
        sampler: Any = self.parts.sampler
        found = self.embedded(["train"])["train"]
        sampler.update(evaluation.class_means(found, sampler.class_labels))

    def write(self, file: Path, found: Mapping[str, Embedded]) -> None:
        """The test's "embeddings", "labels" and "rows" (of the data set); of a gallery with "gallery_" before them."""
        if not self.tested:
            return
        tensors = {}
        for part in self.tested:
            one, start = found[part], "gallery_" if part == "gallery" else ""
            rows = self._places(one)
            tensors[f"{start}embeddings"] = one.points.cpu().contiguous()
            # As the data set numbers its classes; in training, those that are learned come first.
            tensors[f"{start}labels"] = torch.from_numpy(self.parts.dataset.labels[rows].copy())
            tensors[f"{start}rows"] = torch.from_numpy(np.array(rows))
        write_tensors(file, tensors)

    def write_queries(self, file: Path, found: Mapping[str, Embedded], queries: Queries | None = None) -> None:
        """What each query of the test found: "rows" and "labels" (of the data set), "recall@1" and "map@r".

        Queries without a match are left out, so that means over the rest are the metrics of the test.

        Args:
            queries: As ``measured`` gave them for what was ``found``; None: they are measured now.
        """
        asking = [part for part in self.tested if part != "gallery"]
        if not asking:
            return
        one, gallery = found[asking[0]], found.get("gallery")
        if queries is None:
            pair = () if gallery is None else (gallery.points, gallery.labels)
            measure = self.recipe.evaluation.measure
            values = metrics.retrieval(one.points, one.labels, *pair, ks=(1,), measure=measure, per_query=True)
            queries = values["per_query"]
        each = {name: value.cpu() for name, value in queries.items()}
        answered = ~each["mrr"].isnan()
        rows = self._places(one)[answered.numpy()]
        tensors = {
            "rows": torch.from_numpy(rows),
            "labels": torch.from_numpy(self.parts.dataset.labels[rows]),
            "recall@1": each["precision@1"][answered].to(torch.uint8),  # the same, and there whatever ks are
            "map@r": each["map@r"][answered].float(),
        }
        write_tensors(file, tensors)

    def _places(self, one: Embedded) -> evaluation.Rows:
        """Where embedded rows stand in the data set."""
        store = self.parts.store
        return store.rows[one.rows] if isinstance(store, Store) else one.rows
