"""The audit of labeled images: duplicates, and images whose neighbors all have other classes."""

import json

import numpy as np
from search_cases import model_folder, photos

from nearfar.search import Index
from nearfar.search.audit import audit


def test_an_image_among_others_is_found_and_its_copies_do_not_hide_it(tmp_path):
    rng = np.random.default_rng(0)
    points = np.concatenate([center + 0.05 * rng.normal(size=(6, 3)) for center in np.eye(3)]).astype(np.float32)
    labels = ["jay"] * 6 + ["wren"] * 6 + ["kite"] * 5 + ["dove"]  # dove has a single image
    labels[2] = labels[3] = "wren"  # a wrong label, and that of its copy
    points[3] = points[2]
    with Index.from_vectors(points, labels=labels, out=tmp_path / "i") as index:
        found = audit(index, k=3, threshold=0.9999)
    assert [(one.item.id, one.label, one.share) for one in found.suspects] == [(2, "jay", 1.0), (3, "jay", 1.0)]
    assert [[item.id for item in group.items] for group in found.duplicates] == [[2, 3]]


def test_the_command_writes_a_page(tmp_path, nearfar):
    model_folder(tmp_path / "model")
    photos(tmp_path / "photos", 20)
    copy = tmp_path / "photos" / "digit 1" / "copy <b>.png"
    copy.write_bytes((tmp_path / "photos" / "digit 0" / "000.png").read_bytes())
    options = {"--model": "model", "--html": "audit.html", "--json": "audit.json"}
    given = [word for option, name in options.items() for word in (option, str(tmp_path / name))]
    out = nearfar("data", "audit", tmp_path / "photos", *given, "--device", "cpu", "--threshold", "0.999999").out
    assert "\n1 group of duplicates:\n" in out
    groups = json.loads((tmp_path / "audit.json").read_text())["duplicates"]
    assert sorted(groups[0]["names"]) == ["digit 0/000.png", "digit 1/copy <b>.png"]
    page = (tmp_path / "audit.html").read_text()
    assert "copy &lt;b&gt;.png" in page
    assert "identical files" in page
