"""What is wrong with a recipe, one line for each problem: key, value, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from nearfar import data, losses, networks
from nearfar.data.datasets import base as datasets
from nearfar.training.recipe import schema
from nearfar.training.recipe.schema import (
    EvaluationSection,
    LossSection,
    SamplerSection,
    Section,
    StageSection,
    TrainingSection,
)
from nearfar.utils.tensors import shapes_only
from nearfar.utils.validation import nearest

RETRIEVAL = ("map", "map@r", "mrr", "precision@1", "r_precision")
CLUSTERING = ("ami", "f1", "nmi")
VERIFICATION = ("accuracy", "auc")  # of given pairs
RENAMED = {"split.kind": "split.name"}  # keys of earlier versions
Model = TypeVar("Model", bound=Section)
_WORDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_PLURALS = {"integer": "whole numbers", "number": "numbers", "string": "words"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


class Reading(NamedTuple, Generic[Model]):
    """What was read from one table of a file."""

    # The section; with problems, the defaults are in place of wrong values, for further checks, and it is None where
    # that is not possible.
    section: Model | None
    problems: list[str]  # one line each
    wrong: set[str]  # the keys these are about


def read_section(kind: type[Model], where: str, table: Any, *, owner: str = "") -> Reading[Model]:
    """Read one table of a recipe, a grid or a space."""
    if not isinstance(table, Mapping):
        return Reading(None, [f"{where} is {table!r}; allowed: a table, [{where}]"], {where})
    found: list[str] = []
    if issubclass(kind, LossSection) and "name" in table:
        own = {key: value for key, value in table.items() if key in ("name", *schema.WRAPPERS)}
        own["settings"] = {key: value for key, value in table.items() if key not in own}
        if isinstance(own.get("plus"), (list, tuple)):
            readings = [read_section(LossSection, f"{where}.plus.{i}", each) for i, each in enumerate(own["plus"])]
            found += [line for reading in readings for line in reading.problems]
            own["plus"] = tuple(reading.section for reading in readings if reading.section is not None)
        table = own
    elif issubclass(kind, LossSection):
        return Reading(None, [f"{where}.name is missing"], {f"{where}.name"})
    elif issubclass(kind, StageSection) and table.get("loss") is not None:
        loss, found, _ = read_section(LossSection, f"{where}.loss", table["loss"])
        table = {**table, "loss": loss}
    owner = owner or f"[{where}]"
    try:
        return Reading(kind.model_validate(table), found, set())
    except ValidationError as error:
        first = _lines(error, kind, where, owner, table)
    found += first
    wrong = {_path(where, *keys) for keys in first.values() if keys}
    wrong |= {RENAMED[key] for key in wrong if key in RENAMED}
    if not wrong:
        return Reading(None, found, wrong)
    rest = _without(table, first.values())
    try:
        return Reading(kind.model_validate(rest), found, wrong)
    except ValidationError as error:
        found += without_consequences(_lines(error, kind, where, owner, rest), wrong)
        return Reading(None, found, wrong)


def problems(sections: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with sections that are well-formed one by one."""
    used: dict[str, LossSection] = {"loss": sections["loss"]} if "loss" in sections else {}
    stages: tuple[StageSection, ...] = sections.get("stages", ())
    used |= {f"stages.{i}.loss": stage.loss for i, stage in enumerate(stages) if stage.loss is not None}
    if "data" in sections:
        yield from _data(sections["data"])
    if "network" in sections:
        yield from _network(sections["network"])
        yield from _frozen(sections["network"], sections)
    for where, section in used.items():
        yield from _loss(where, section, *(sections.get(name) for name in ("sampler", "training", "network")))
    if "training" in sections:
        yield from _length(sections["training"], stages, sections.get("sampler"))
    if "evaluation" in sections:
        yield from _evaluation(sections["evaluation"], sections)


def without_consequences(lines: Iterable[str], wrong: set[str]) -> list[str]:
    """The problems that are about none of the keys which are known to be wrong."""
    return [line for line in lines if wrong.isdisjoint(re.split(r"[ ,;]", line))]


def describe(schema: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    words = [word for each in schema.get("anyOf", [schema]) for word in _words(each)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _words(schema: Mapping[str, Any]) -> list[str]:
    if "enum" in schema or "const" in schema:
        return [
            f'"{word}"' if isinstance(word, str) else str(word) for word in schema.get("enum", [schema.get("const")])
        ]
    kind = schema.get("type")
    bounds = " and ".join(f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema)
    if kind == "array":
        each = (schema.get("prefixItems") or [schema.get("items", {})])[0]
        many = f"{len(schema['prefixItems'])} " if "prefixItems" in schema else ""
        many = many or ("one or more " if schema.get("minItems") else "")
        inner = describe(each) if each else "values"
        inner = inner.replace(_WORDS.get(each.get("type"), "?"), _PLURALS.get(each.get("type"), "?"), 1)
        return [f"a list of {many}{inner}"]
    word = '"none"' if kind == "null" else _WORDS.get(str(kind), "a table")
    return [f"{word} {bounds}" if bounds else word]


def _lines(
    error: ValidationError, model: type[BaseModel], where: str, owner: str, table: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """A line for each wrong key, whatever pydantic says of its parts, with the keys that lead to it in the table."""
    schema = model.model_json_schema()
    found: dict[str, tuple[str, ...]] = {}
    for one in error.errors():
        keys, place, value, above = _locate(one["loc"], table, schema)
        path = _path(where, *keys)
        if not keys:
            found |= dict.fromkeys(str(one["ctx"]["error"]).splitlines(), ())
        elif keys in found.values():
            continue
        elif path in RENAMED:
            found[f"{path} is now called {RENAMED[path]}"] = keys
        elif one["type"] == "extra_forbidden":
            inner = _path(where, *keys[:-1])
            has = owner if inner == where else inner
            found[unknown_key(inner, keys[-1], above.get("properties", {}), has)] = keys
        elif one["type"] == "missing" and value is None:
            found[f"{path} is missing"] = keys
        else:
            found[f"{path} is {_shown(value)}{_meant(value, place)}; allowed: {describe(place)}"] = keys
    return found


def _locate(
    location: tuple[int | str, ...], table: Mapping[str, Any], schema: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any], Any, dict[str, Any]]:
    """Follow a location of pydantic through tables, and not into lists or alternatives."""
    keys: tuple[str, ...] = ()
    value: Any = table
    place = above = schema
    for key in location:
        if not isinstance(value, Mapping):
            break
        above, keys, value = place, (*keys, str(key)), value.get(str(key))
        inner = above.get("additionalProperties")
        place = above.get("properties", {}).get(key, inner if isinstance(inner, dict) else {})
        if "$ref" in place:
            place = schema["$defs"][place["$ref"].rpartition("/")[2]]
    return keys, place, value, above


def _path(where: str, *keys: str) -> str:
    return ".".join([where, *keys] if where else keys)


def _without(table: Any, paths: Collection[tuple[str, ...]], at: tuple[str, ...] = ()) -> Any:
    """A table without the values at some paths."""
    if not isinstance(table, Mapping):
        return table
    return {
        key: _without(value, paths, (*at, str(key))) for key, value in table.items() if (*at, str(key)) not in paths
    }


def unknown_key(where: str, key: str, known: Collection[str], owner: str) -> str:
    """The message about a key that does not exist."""
    has = ", ".join(known) or "no settings"
    meant = nearest(key, [*known, "name"] if where == "loss" else known, f"{where}." if where else "")
    return f"unknown key {_path(where, key)}{meant}; {owner} has {has}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as in TOML
    if isinstance(value, Mapping):
        return f"a table ({', '.join(map(str, value)) or 'empty'})"
    return repr(list(value) if isinstance(value, tuple) else value)


def _meant(value: Any, schema: Mapping[str, Any]) -> str:
    choices = [word for each in schema.get("anyOf", [schema]) for word in each.get("enum", [each.get("const")])]
    return nearest(value, [word for word in choices if isinstance(word, str)]) if isinstance(value, str) else ""


def _name(path: str, name: str, known: list[str]) -> str:
    return f"{path} is {name!r}{nearest(name, known)}; allowed: {', '.join(known)}"


def _settings(model: type[BaseModel], where: str, owner: str, values: Mapping[str, Any]) -> list[str]:
    """Settings that something does not have, or of another type."""
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        return [*_lines(error, model, where, owner, values)]
    return []


def _data(section: schema.DataSection) -> Iterator[str]:
    name = section.name
    if name not in data.names():
        yield _name("data.name", name, data.names())
        return
    yield from _settings(schema.data_settings(name), "data.settings", name, section.settings)
    if section.root is not None and datasets.takes_root(name) is None:
        yield f"data.root is {section.root!r}; {name} takes none"


def _network(section: schema.NetworkSection) -> Iterator[str]:
    name = section.name
    if ":" in name:
        return  # checked by the other library
    if name not in networks.names():
        yield _name("network.name", name, networks.names())
        return
    yield from _settings(schema.network_settings(name), "network.settings", name, section.settings)


def _frozen(section: schema.NetworkSection, sections: Mapping[str, Any]) -> Iterator[str]:
    """What is without effect on features that are computed once."""
    if not section.freeze:
        return
    once = "with network.freeze, each image has the features of its center crop"
    augmentation, evaluation, training = (sections.get(key) for key in ("augmentation", "evaluation", "training"))
    if augmentation is not None:
        changed = augmentation.effects | ({"crop": augmentation.crop} if augmentation.crop == "random_resized" else {})
        yield from (f"augmentation.{key} is {value!r}; {once}" for key, value in changed.items())
    if evaluation is not None and evaluation.crops > 1:
        yield f"evaluation.crops is {evaluation.crops}; {once}"
    if training is not None and training.warmup_epochs:
        yield f"training.warmup_epochs is {training.warmup_epochs}; with network.freeze, only the head is ever trained"


def _loss(
    where: str,
    section: LossSection,
    sampler: SamplerSection | None,
    training: TrainingSection | None,
    network: schema.NetworkSection | None,
) -> Iterator[str]:
    terms, name = list(_terms(where, section)), section.name
    unknown = [
        _name(f"{place}.name", each.name, losses.names()) for place, each in terms if each.name not in losses.names()
    ]
    yield from unknown
    if unknown:
        return
    found = [line for place, each in terms for line in _loss_settings(place, each)]
    yield from found
    if section.weight != 1.0:
        yield f"{where}.weight is {section.weight}; it is for losses in {where}.plus"
    if not found and section != section.without_wrappers():
        longest = max((dim for _, each in terms for dim in each.matryoshka), default=1)
        dim = longest + 1 if network is None or network.dim is None else network.dim
        error = _refused(section, dim)
        yield from [] if error is None else [f"{where}.{error}"]
    pairs = any(issubclass(losses.get(each), losses.PairLoss) for each in section.names)
    memory = 0 if training is None else training.memory
    if pairs and not memory and sampler is not None and sampler.per_class == 1:
        yield f"sampler.per_class is 1; {name} needs positives, at least 2 images of each class"
    if memory and not pairs:
        yield (
            f"training.memory is {memory} and {where}.name is {name!r}, which does not compare with other embeddings; "
            "a memory is for pair losses"
        )
    if training is not None and training.shard_classes and not found:
        loss = section.create(num_classes=2, dim=1)
        if not isinstance(loss, losses.ProxyLoss) or not loss.shardable:
            yield (
                f"training.shard_classes is true and {where}.name is {name!r}, which has no class vectors that can be "
                "distributed over processes; allowed are losses that derive from ClassificationLoss, and proxy_anchor"
            )


def _terms(where: str, section: LossSection) -> Iterator[tuple[str, LossSection]]:
    """All losses in a section, each with the place of its table."""
    yield where, section
    for number, each in enumerate(section.plus):
        yield from _terms(f"{where}.plus.{number}", each)


def _loss_settings(where: str, section: LossSection) -> Iterator[str]:
    defaults = losses.defaults(section.name)
    given = {
        key: None if value == schema.NONE and not isinstance(defaults.get(key), str) else value
        for key, value in section.settings.items()
    }
    model = schema.loss_settings(section.name)
    wrong = [key for key in given if key in schema.FILLED and key in defaults and key not in model.model_fields]
    for key in wrong:
        yield f"{where}.{key} cannot be set; it comes from data and network"
    found = _settings(model, where, section.name, {key: value for key, value in given.items() if key not in wrong})
    yield from found
    if found or wrong or (error := _refused(section.without_wrappers())) is None:
        return
    # A constructor names one wrong setting; the others are found by trying each on its own.
    alone = {
        key: _refused(LossSection(name=section.name, settings={key: value})) for key, value in section.settings.items()
    }
    for message in dict.fromkeys([one for one in alone.values() if one is not None] or [error]):
        yield f"{where}.{message}" if message.split(" ")[0] in defaults else f"{where}: {message}"


def _refused(section: LossSection, dim: int = 2) -> str | None:
    """Why a loss cannot be created."""
    try:
        with shapes_only():
            section.create(num_classes=2, dim=dim)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _length(
    training: TrainingSection, stages: tuple[StageSection, ...], sampler: SamplerSection | None
) -> Iterator[str]:
    if (training.epochs is None) == (training.iterations is None):
        given = "both are given" if training.epochs else "neither is given"
        yield f"training.epochs or training.iterations is needed; {given}"
        return
    if training.epochs is not None and training.warmup_epochs >= training.epochs:
        yield f"training.warmup_epochs is {training.warmup_epochs}; it must be < training.epochs, {training.epochs}"
    if sampler is not None and 0 < training.memory < sampler.images:
        yield f"training.memory is {training.memory}; it must hold at least a batch, {sampler.images} embeddings"
    if training.memory_warmup and not training.memory:
        yield f"training.memory_warmup is {training.memory_warmup}; it needs training.memory > 0"
    if not stages:
        return
    if training.epochs is None:
        yield "stages are counted in epochs; give training.epochs instead of training.iterations"
        return
    for number, stage in enumerate(stages[:-1]):
        if stage.epochs is None:
            yield f"stages.{number}.epochs is missing; only the last stage may omit it"
    lengths = sum(stage.epochs or 0 for stage in stages)
    if stages[-1].epochs is None and lengths >= training.epochs:
        yield f"the first stages take {lengths} epochs of training.epochs, {training.epochs}: none is left for the last"
    elif stages[-1].epochs is not None and lengths != training.epochs:
        yield f"the stages take {lengths} epochs and training.epochs is {training.epochs}; the last may omit its epochs"


def _evaluation(evaluation: EvaluationSection, sections: Mapping[str, Any]) -> Iterator[str]:
    if "selection" in sections:
        metric = sections["selection"].metric
        ranks = [f"recall@{k}" for k in evaluation.ks]
        known = [*ranks, *RETRIEVAL, *CLUSTERING, *VERIFICATION]
        if re.fullmatch(r"recall@\d+", metric) and metric not in ranks:
            yield f"selection.metric is {metric!r} and evaluation.ks is {list(evaluation.ks)}; add its k there"
        elif metric not in known:
            yield _name("selection.metric", metric, known)
        elif metric in CLUSTERING and not evaluation.clustering:
            yield f"selection.metric is {metric!r}; it needs evaluation.clustering = true"
    if not evaluation.test and "split" in sections and sections["split"].name == "standard":
        yield (
            "evaluation.test is false and split.name is 'standard', which has no validation classes: there is nothing "
            "to evaluate; split.name = 'fixed_validation' sets some classes aside"
        )
    if evaluation.every == 0 and "schedule" in sections and sections["schedule"].name == "plateau":
        yield "schedule.name is 'plateau', which needs evaluations, and evaluation.every is 0"
