"""Filters on labels, names and metadata."""

import pytest

from nearfar.search.filters import NumberText, combine, parse, select
from nearfar.search.items import Item

ITEMS = [
    Item(1, "garden/a.jpg", "jay", metadata={"year": 2018, "wild": True}),
    Item(3, "garden/b.jpg", "wren", metadata={"year": 2020}),
    Item(4, "wood/c.jpg", None, metadata={"year": "unknown"}),
    Item(9, "wood/d.jpg", "7"),
]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, [1, 3, 4, 9]),
        ({"label": "jay"}, [1]),
        ({"label": ["jay", "wren"]}, [1, 3]),
        ({"label": 7}, [9]),
        ({"label": None}, [4]),
        ({"label": {"!=": "jay"}}, [3, 4, 9]),
        ({"name": {"~": "garden/*"}}, [1, 3]),
        ({"year": {">=": 2018, "<": 2020}}, [1]),
        ({"year": {">": 2018}}, [3]),
        ({"year": 2020, "label": "wren"}, [3]),
        ({"year": 2020, "label": "jay"}, []),
        ({"wild": True}, [1]),
        ({"id": [4, 9]}, [4, 9]),
        ({"year": {"==": 2020}}, [3]),
        ({"label": {"!=": ["jay", "wren"]}}, [4, 9]),
        ({"name": {"~": ["garden/*", "*b.jpg"]}}, [3]),
    ],
)
def test_items_that_pass(where, expected):
    assert select(ITEMS, where).tolist() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("label=jay", ("label", "jay")),
        ("label==jay", ("label", "jay")),
        ("label=jay,wren", ("label", ["jay", "wren"])),
        ("year>=2019", ("year", {">=": 2019})),
        ("year<2019.5", ("year", {"<": 2019.5})),
        ("year!=2019", ("year", {"!=": 2019})),
        ("label!=jay,wren", ("label", {"!=": ["jay", "wren"]})),
        ("name~a/*.jpg", ("name", {"~": "a/*.jpg"})),
    ],
)
def test_filters_are_read_from_words(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["label", "=jay", "label=", ">3"])
def test_words_that_are_no_filter(text):
    with pytest.raises(ValueError, match="it must be KEY=VALUE"):
        parse(text)


def test_filters_are_joined():
    assert combine([("year", {">": 1}), ("year", {"<": 5}), ("label", "jay")]) == {
        "year": {">": 1, "<": 5},
        "label": "jay",
    }
    with pytest.raises(ValueError, match="has 'label' twice"):
        combine([("label", "jay"), ("label", "wren")])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["label!=jay", "label!=wren"], [4, 9]),
        (["label!=jay", "label!=wren", "label!=7"], [4]),
        (["year>2019", "year>2017"], [3]),
        (["name~*b.jpg", "name~garden/*"], [3]),
    ],
)
def test_the_same_sign_twice_means_both(words, expected):
    assert select(ITEMS, combine([parse(word) for word in words])).tolist() == expected


@pytest.mark.parametrize("label", ["001", "1e3", "1_000", "007", "+5", "1.50", "nan"])
def test_a_class_may_be_spelled_like_a_number(label):
    """Words are compared with what was typed, numbers with what it means."""
    number = float(label.replace("_", ""))
    others = ["1", "1.0", "1000", "1000.0", "7", "5", "1.5"]
    items = [Item(0, "a", label, metadata={"size": number}), *(Item(n, "b", each) for n, each in enumerate(others, 1))]
    assert select(items, combine([parse(f"label={label}")])).tolist() == [0]
    assert select(items, combine([parse(f"label=x,{label}")])).tolist() == [0]
    assert select(items, combine([parse(f"label!={label}")])).tolist() == [*range(1, 8)]
    if number == number:
        assert select(items, combine([parse(f"size={label}")])).tolist() == [0]
        assert select(items, combine([parse(f"size>={label}")])).tolist() == [0]


def test_wrong_filters_are_named():
    with pytest.raises(ValueError, match=r"where has 'lable' \(did you mean 'label'\?\)"):
        select(ITEMS, {"lable": "jay"})
    with pytest.raises(ValueError, match=r"where has '=>' for 'year'"):
        select(ITEMS, {"year": {"=>": 3}})
    with pytest.raises(TypeError, match="where has a bytes for 'label'"):
        select(ITEMS, {"label": b"jay"})
    with pytest.raises(TypeError, match="where is a list"):
        select(ITEMS, ["jay"])


class Counted(str):
    """Text that counts how often it is compared or hashed."""

    looks = 0

    def __hash__(self):
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other):
        Counted.looks += 1
        return super().__eq__(other)

    def __ne__(self, other):
        Counted.looks += 1
        return super().__ne__(other)


@pytest.mark.parametrize("sign", ["", "==", "!="])
def test_many_alternatives_cost_one_look_at_each_item(sign):
    items = [Item(number, Counted(number)) for number in range(200)]
    names = [str(number) for number in range(100, 1100)]
    wanted = {"name": {"": names, "==": names[0], "!=": {"!=": names}}[sign]}
    Counted.looks = 0
    passed = select(items, wanted).tolist()
    assert passed == {"": [*range(100, 200)], "==": [100], "!=": [*range(100)]}[sign]
    assert Counted.looks <= 3 * len(items)


@pytest.mark.parametrize("value", [["jay"], {"a": 1}, None, True, 1, 1.0, "1", "True", "001", 7])
@pytest.mark.parametrize("alternatives", [["jay"], [1], [True, "7"], ["1", None], [NumberText(1, "001")]])
def test_alternatives_are_compared_one_by_one(value, alternatives):
    """The sets hold what a loop over the alternatives finds."""

    def equal(wanted):
        if isinstance(value, str):
            return wanted is not None and value == str(wanted)
        return bool(value == (wanted.number if isinstance(wanted, NumberText) else wanted))

    items = [Item(0, "a", metadata={"key": value})]
    passed = any(equal(wanted) for wanted in alternatives)
    assert (select(items, {"key": alternatives}).tolist() == [0]) == passed
    assert (select(items, {"key": {"!=": alternatives}}).tolist() == [0]) != passed
