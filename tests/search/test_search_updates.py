"""An index follows a folder: only what is new is embedded, and what was moved keeps its id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from search_cases import digit, model, photos

from nearfar.search import Index
from nearfar.search.encoder import Encoder


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    photos(tmp_path / "photos", 6)
    with Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu") as made:
        yield made


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures the model was shown, a number for each batch."""
    seen: list[int] = []
    original = Encoder.vectors

    def count(self: Encoder, pictures: object) -> object:
        seen.append(len(pictures))  # type: ignore[arg-type]
        return original(self, pictures)  # type: ignore[arg-type]

    monkeypatch.setattr(Encoder, "vectors", count)
    return seen


def test_what_is_unchanged_is_not_embedded_again(index: Index, tmp_path: Path, embedded: list[int]) -> None:
    found = index.update(tmp_path / "photos")
    assert found.unchanged == 6
    assert [found.added, found.moved, found.replaced, found.missing] == [[], [], [], []]
    assert embedded == []


def test_only_what_is_new_is_embedded(index: Index, tmp_path: Path, embedded: list[int]) -> None:
    Image.fromarray(digit(40)).save(tmp_path / "photos" / "new.png")
    found = index.update(tmp_path / "photos")
    assert (found.added, found.unchanged, embedded) == ([6], 6, [1])
    assert index.item(6).label is None  # it lies in no class folder


def test_moved_files_keep_their_id(index: Index, tmp_path: Path, embedded: list[int]) -> None:
    (tmp_path / "photos" / "moved").mkdir()
    (tmp_path / "photos" / "digit 2" / "002.png").rename(tmp_path / "photos" / "moved" / "x.png")
    found = index.update(tmp_path / "photos", prune=True)
    assert (found.moved, found.missing, embedded) == ([2], [], [])
    assert (index.item(2).name, index.item(2).label) == ("moved/x.png", "moved")


def test_files_that_change_places_keep_their_ids(index: Index, tmp_path: Path, embedded: list[int]) -> None:
    one, other = (tmp_path / "photos" / f"digit {n}" / f"00{n}.png" for n in (1, 2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    found = index.update(tmp_path / "photos")
    assert sorted(found.moved) == [1, 2]
    assert (index.item(1).name, index.item(2).name, embedded) == ("digit 2/002.png", "digit 1/001.png", [])


def test_a_copy_is_an_item_of_its_own_but_not_embedded(index: Index, tmp_path: Path, embedded: list[int]) -> None:
    original = tmp_path / "photos" / "digit 2" / "002.png"
    (tmp_path / "photos" / "copy.png").write_bytes(original.read_bytes())
    found = index.update(tmp_path / "photos")
    assert (found.added, found.moved, embedded) == ([6], [], [])
    assert index.search(6, 1).ids == [2]
    assert index.thumbnail(6) == index.thumbnail(2)


def test_changed_files_get_a_new_id(index: Index, tmp_path: Path) -> None:
    Image.fromarray(digit(40)).save(tmp_path / "photos" / "digit 2" / "002.png")
    found = index.update(tmp_path / "photos")
    assert (found.added, found.replaced) == ([6], [2])
    assert 2 not in index
    assert index.item(6).name == "digit 2/002.png"


def test_deleted_files_are_pruned_when_asked(index: Index, tmp_path: Path) -> None:
    (tmp_path / "photos" / "digit 2" / "002.png").unlink()
    assert index.update(tmp_path / "photos").missing == [2]
    assert 2 in index
    assert index.update(tmp_path / "photos", prune=True).missing == [2]
    assert 2 not in index


def test_adding_moves_and_removes_nothing(index: Index, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "copy.png").write_bytes((tmp_path / "photos" / "digit 2" / "002.png").read_bytes())
    found = index.add(other)
    assert (found.added, found.moved, found.missing) == ([6], [], [])
    assert index.add(other).unchanged == 1
    assert len(index) == 7


def test_an_interrupted_build_is_gone_on_with(tmp_path: Path, embedded: list[int]) -> None:
    photos(tmp_path / "photos", 12)

    class Interrupt(Exception):
        pass

    def watch(work: str):  # type: ignore[no-untyped-def]
        def progress(done: int, total: int) -> None:
            if work == "embedding" and done == 8:
                raise Interrupt

        return progress

    with pytest.raises(Interrupt):
        Index.build(model(), tmp_path / "photos", out=tmp_path / "j", device="cpu", batch_size=4, watch=watch)
    with Index.open(tmp_path / "j", device="cpu") as index:
        assert len(index) == 8
        index.update(tmp_path / "photos")
        assert len(index) == 12
    assert sum(embedded) == 12


def test_metadata_and_labels_can_change(index: Index, tmp_path: Path) -> None:
    index.update(tmp_path / "photos", metadata={"digit 2/002.png": {"year": 2020}}, labels={"digit 2/002.png": "two"})
    assert index.item(2).metadata == {"year": 2020}
    assert index.item(2).label == "two"
    assert index.search(0, where={"year": 2020}).ids == [2]
