"""What is wrong with a recipe, one line for each problem: key, value, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from nearfar import losses
from nearfar.utils.validation import nearest

if TYPE_CHECKING:
    from nearfar.training.recipe.schema import LossSection, Recipe

RETRIEVAL = ("map", "map@r", "mrr", "precision@1", "r_precision")
CLUSTERING = ("ami", "f1", "nmi")
VERIFICATION = ("accuracy", "auc")  # of given pairs
FILE = "file"  # context of a validation: the settings of a loss are beside its name
RECIPE = "a recipe"
Model = TypeVar("Model", bound=BaseModel)
_WORDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_PLURALS = {"integer": "whole numbers", "number": "numbers", "string": "words"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def read(kind: type[Model], table: Any, *, where: str = "", owner: str) -> tuple[Model | None, list[str]]:
    """Read a recipe, settings, a grid or a parameter of a space; None with all problems if there are any."""
    try:
        return kind.model_validate(table, context=FILE), []
    except ValidationError as error:
        if not isinstance(table, Mapping):
            return None, [f"{where} is {table!r}; allowed: a table, [{where}]"]
        return None, _lines(error, kind, where, owner, table)


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
) -> list[str]:
    """A line for each wrong key, whatever pydantic says of its parts, and the lines of conflicts."""
    schema = model.model_json_schema()
    lines: dict[str, tuple[str, ...]] = {}  # with the keys that lead to the value
    for problem in error.errors():
        keys, place, value, above = _locate(problem["loc"], table, schema)
        path = _path(where, *keys)
        if problem["type"] == "value_error":  # of a section or of all, about several keys
            conflicts = str(problem["ctx"]["error"])
            if place.get("title") == "LossSection":
                conflicts = re.sub(r"\bloss(?=[.:])", path, conflicts)
            lines |= dict.fromkeys(conflicts.splitlines(), ())
        elif keys in lines.values():
            continue
        elif problem["type"] == "extra_forbidden" and owner == RECIPE and len(keys) == 1:
            known = above["properties"]
            lines[f"unknown section [{path}]{nearest(path, known)}; a recipe has {', '.join(known)}"] = keys
        elif problem["type"] == "extra_forbidden":
            inner = _path(where, *keys[:-1])
            has = owner if inner == where else f"[{inner}]"
            lines[unknown_key(inner, keys[-1], above.get("properties", {}), has)] = keys
        elif problem["type"] == "missing" and value is None:
            lines[f"section [{path}] is missing" if "properties" in place else f"{path} is missing"] = keys
        elif "$ref" in place.get("items", {}):
            lines[f"{path} is {_shown(value)}; allowed: a list of tables, each begins with [[{path}]]"] = keys
        else:
            lines[f"{path} is {_shown(value)}{_meant(value, place)}; allowed: {describe(place)}"] = keys
    return [*lines]


def _locate(
    location: tuple[int | str, ...], table: Mapping[str, Any], schema: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any], Any, dict[str, Any]]:
    """Follow a location of pydantic through tables and lists of tables, and not into other lists or alternatives."""
    keys: tuple[str, ...] = ()
    value: Any = table
    place = above = _resolved(schema, schema)
    for key in location:
        if isinstance(value, Mapping):
            inner = place.get("additionalProperties")
            above, place = place, place.get("properties", {}).get(key, inner if isinstance(inner, dict) else {})
            value = value.get(str(key))
        elif isinstance(key, int) and "$ref" in place.get("items", {}):
            above, place, value = place, place["items"], value[key]
        else:
            break
        keys, place = (*keys, str(key)), _resolved(place, schema)
    return keys, place, value, above


def _resolved(place: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The definition of a table, which may be optional, in place of a reference to it."""
    references = [each["$ref"] for each in (place, *place.get("anyOf", ())) if "$ref" in each]
    resolved: dict[str, Any] = schema["$defs"][references[0].rpartition("/")[2]] if references else place
    return resolved


def _path(where: str, *keys: str) -> str:
    return ".".join([where, *keys] if where else keys)


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


def unknown_name(path: str, name: str, known: list[str]) -> str:
    """The message about a name that is not registered."""
    return f"{path} is {name!r}{nearest(name, known)}; allowed: {', '.join(known)}"


# --- what sections say of each other ---------------------------------------------------------------------------------


def problems(recipe: Recipe) -> Iterator[str]:
    """Contradictions between sections."""
    used = {"loss": recipe.loss}
    used |= {f"stages.{i}.loss": stage.loss for i, stage in enumerate(recipe.stages) if stage.loss is not None}
    if recipe.network.freeze:
        yield from _frozen(recipe)
    for where, section in used.items():
        yield from _loss(where, section, recipe)
    if recipe.selection.blend is not False:
        yield from _blend(recipe)
    yield from _length(recipe)
    yield from _evaluation(recipe)


def _frozen(recipe: Recipe) -> Iterator[str]:
    """What is without effect on features that are computed once."""
    once = "with network.freeze, each image has the features of its center crop"
    augmentation, warmup = recipe.augmentation, recipe.training.warmup_epochs
    changed = augmentation.effects | ({"crop": augmentation.crop} if augmentation.crop == "random_resized" else {})
    yield from (f"augmentation.{key} is {value!r}; {once}" for key, value in changed.items())
    if recipe.evaluation.crops > 1:
        yield f"evaluation.crops is {recipe.evaluation.crops}; {once}"
    if warmup:
        yield f"training.warmup_epochs is {warmup}; with network.freeze, only the head is ever trained"


def _blend(recipe: Recipe) -> Iterator[str]:
    """What keeps a share of a training from being a network between two others."""
    network, split, selection = recipe.network, recipe.split.name, recipe.selection
    blend = f"selection.blend is {_shown(selection.blend)}"
    trained = not network.freeze and network.name != "linear"
    if network.head not in ("residual", "none") and network.dim is not None:
        yield f"{blend} and network.head is {network.head!r}; the features before the training have the head 'residual'"
    if trained and not network.freeze_batchnorm:
        yield f"{blend}; it needs network.freeze_batchnorm = true, as statistics of batch norms are not on a line"
    if selection.patience is not None:
        yield f"{blend} and selection.patience is {selection.patience}; a share of the last epoch is kept"
    unseen = ("fixed_validation", "k_fold", *(() if trained else ("standard", "train_only")))
    if selection.blend is True and split not in unseen:
        yield (
            f"{blend} and split.name is {split!r}; it needs validation classes: split.name = 'fixed_validation', or "
            "features of a frozen network (network.freeze = true)"
        )


def _loss(where: str, section: LossSection, recipe: Recipe) -> Iterator[str]:
    sampler, training, name = recipe.sampler, recipe.training, section.name
    if section.weight != 1.0:
        yield f"{where}.weight is {section.weight}; it is for losses in {where}.plus"
    longest = max((dim for term in section.terms for dim in term.matryoshka), default=1)
    if error := section.refused(recipe.network.dim or longest + 1):
        yield f"{where}.{error}"
        return
    pairs = any(issubclass(losses.get(each), losses.PairLoss) for each in section.names)
    if pairs and not training.memory and sampler.per_class == 1:
        yield f"sampler.per_class is 1; {name} needs positives, at least 2 images of each class"
    if training.memory and not pairs:
        yield (
            f"training.memory is {training.memory} and {where}.name is {name!r}, which does not compare with other "
            "embeddings; a memory is for pair losses"
        )
    if training.shard_classes:
        loss = section.create(num_classes=2, dim=longest + 1)
        if not isinstance(loss, losses.ProxyLoss) or not loss.shardable:
            yield (
                f"training.shard_classes is true and {where}.name is {name!r}, which has no class vectors that can be "
                "distributed over processes; allowed are losses that derive from ClassificationLoss, and proxy_anchor"
            )


def _length(recipe: Recipe) -> Iterator[str]:
    training, stages, images = recipe.training, recipe.stages, recipe.sampler.images
    if 0 < training.memory < images:
        yield f"training.memory is {training.memory}; it must hold at least a batch, {images} embeddings"
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


def _evaluation(recipe: Recipe) -> Iterator[str]:
    evaluation, metric = recipe.evaluation, recipe.selection.metric
    ranks = [f"recall@{k}" for k in evaluation.ks]
    known = [*ranks, *RETRIEVAL, *CLUSTERING, *VERIFICATION]
    if re.fullmatch(r"recall@\d+", metric) and metric not in ranks:
        yield f"selection.metric is {metric!r} and evaluation.ks is {list(evaluation.ks)}; add its k there"
    elif metric not in known:
        yield unknown_name("selection.metric", metric, known)
    elif metric in CLUSTERING and not evaluation.clustering:
        yield f"selection.metric is {metric!r}; it needs evaluation.clustering = true"
    if not evaluation.test and recipe.split.name == "standard":
        yield (
            "evaluation.test is false and split.name is 'standard', which has no validation classes: there is nothing "
            "to evaluate; split.name = 'fixed_validation' sets some classes aside"
        )
    if evaluation.every == 0 and recipe.schedule.name == "plateau":
        yield "schedule.name is 'plateau', which needs evaluations, and evaluation.every is 0"
