"""Every public object has a docstring that tools can parse, and its ``Args`` are those of its signature."""

import re
from functools import cache

import griffe
import pytest

# Methods of PyTorch modules whose meaning is PyTorch's own.
FROM_TORCH = {"forward", "extra_repr", "get_extra_state", "set_extra_state"}
HEADINGS = re.compile(
    r"^\s*(Parameters|Args|Returns|Yields|Raises|Formula|Reference|References|Differences|Example|Examples|Note)\s*$",
    re.MULTILINE,
)


# What these export is all that is public in them.
CLOSED = ("distributed", "engine", "losses", "migrate", "mining", "supervision")
SECTIONS = {
    griffe.DocstringSectionKind.attributes,
    griffe.DocstringSectionKind.parameters,
    griffe.DocstringSectionKind.raises,
    griffe.DocstringSectionKind.returns,
    griffe.DocstringSectionKind.yields,
}


@cache
def package():
    """nearfar as griffe reads it, without importing it."""
    loaded = griffe.load("nearfar", search_paths=["src"], docstring_parser="google", resolve_aliases=True)
    assert isinstance(loaded, griffe.Module)
    return loaded


def modules(module):
    """A module and all public modules below it."""
    yield module
    for name, member in module.modules.items():
        if not member.is_alias and (not name.startswith("_") or name == "__main__"):
            yield from modules(member)


def is_public(name):
    return not name.startswith("_")


def overrides(method):
    """Whether a base class documents a method of the same name, or has an attribute that a property replaces."""
    parent = method.parent
    if method.name in FROM_TORCH:
        return True
    if not isinstance(parent, griffe.Class):
        return False
    inherited = [base.members[method.name] for base in parent.mro() if method.name in base.members]
    return any(member.has_docstring or isinstance(method, griffe.Attribute) for member in inherited)


def public_objects(module):
    """The module, its public functions and classes, and their public methods and properties."""
    yield module
    for name, member in module.members.items():
        if member.is_alias or not is_public(name) or isinstance(member, griffe.Module):
            continue
        if isinstance(member, griffe.Class):
            yield member
            for inner_name, inner in member.members.items():
                if inner.is_alias or not is_public(inner_name):
                    continue
                is_property = isinstance(inner, griffe.Attribute) and "property" in inner.labels
                if (isinstance(inner, griffe.Function) or is_property) and not overrides(inner):
                    yield inner
        elif isinstance(member, griffe.Function):
            yield member


def exported_objects(module):
    """The module and its public objects, where its package exports it; only those in ``__all__``, if it has one."""
    package = module.parent
    if module.is_init_module or package is None or package.exports is None or module.name in package.exports:
        for thing in public_objects(module):
            name = thing.path.removeprefix(f"{module.path}.").partition(".")[0]
            if thing is module or module.exports is None or name in module.exports:
                yield thing


def documented(thing):
    """The names in the ``Args`` of a docstring, or None without such a section."""
    for section in thing.docstring.parse("google", warnings=False):
        if section.kind is griffe.DocstringSectionKind.parameters:
            return [parameter.name.lstrip("*") for parameter in section.value]
    return None


def inherited(thing):
    """The settings that the base classes of a class document."""
    bases = thing.mro() if isinstance(thing, griffe.Class) else []
    return {name for base in bases if base.docstring is not None for name in documented(base) or ()}


def accepted(thing):
    """The names of the parameters that a call may give."""
    parameters = thing.parameters if isinstance(thing, griffe.Class | griffe.Function) else ()
    return [each.name.lstrip("*") for each in parameters if each.name not in ("self", "cls")]


def problems(thing):
    if thing.docstring is None:
        return [f"{thing.path} has no docstring"]
    found = [f"{thing.path}: heading {line.strip()!r} has no colon" for line in HEADINGS.findall(thing.docstring.value)]
    names = documented(thing)
    if names is not None and names != [
        name for name in accepted(thing) if name in names or name not in inherited(thing)
    ]:
        found.append(f"{thing.path} documents {names} and takes {accepted(thing)}")
    return found


@pytest.mark.parametrize("name", sorted(module.path for module in modules(package())))
def test_public_objects_have_docstrings_that_match_their_signatures(name):
    found = package() if name == "nearfar" else package()[name.removeprefix("nearfar.")]
    assert [problem for thing in public_objects(found) for problem in problems(thing)] == []


def test_everything_a_package_exports_documents_its_arguments():
    missing = []
    for module in modules(package()):
        for name in module.exports or ():
            thing = module[str(name)]
            thing = thing.final_target if thing.is_alias else thing
            callable_ = isinstance(thing, griffe.Class | griffe.Function) and thing.docstring is not None
            if callable_ and {*accepted(thing)} - inherited(thing) and documented(thing) is None:
                missing.append(thing.path)
    assert sorted(set(missing)) == []


@pytest.mark.parametrize("name", CLOSED)
def test_what_a_package_does_not_export_has_no_sections(name):
    exported = {thing.path for thing in exported_objects(package()[name])}
    for export in package()[name].exports:
        thing = package()[name][str(export)]
        exported.add((thing.final_target if thing.is_alias else thing).path)
    sectioned = [
        thing.path
        for module in modules(package()[name])
        for thing in public_objects(module)
        if thing is not module and any(section.kind in SECTIONS for section in thing.docstring.parse("google"))
    ]
    assert [path for path in sectioned if path not in exported and path.rpartition(".")[0] not in exported] == []


def test_a_wrong_docstring_is_found():
    source = (
        'def double(x, y):\n    """Twice.\n\n    Args:\n        x: One.\n        z: Two.\n    """\ndef bare(): pass\n'
    )
    with griffe.temporary_visited_module(source, docstring_parser="google") as module:
        double, bare = module["double"], module["bare"]
        assert problems(double) == ["module.double documents ['x', 'z'] and takes ['x', 'y']"]
        assert problems(bare) == ["module.bare has no docstring"]
