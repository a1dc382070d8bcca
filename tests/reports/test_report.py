"""The page of a run: complete, self-contained, and never markup from data."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from runs import NASTY, photos, write_embedded
from safetensors.numpy import save_file

import nearfar as nf
from nearfar.bench import Run
from nearfar.reports import charts, gallery
from nearfar.reports.run_report import _curves, measured, report
from nearfar.training import verdict

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Elements, attributes and text of a page; complains where tags do not match."""

    def __init__(self, file):
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.tags = []
        self.text = []
        self._open = []
        self.feed(self.source)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] != "style":
            self.text.append(data)

    @property
    def titles(self):
        return re.findall(r"<h2>(.*?)</h2>", self.source)

    def with_class(self, name):
        return [found for _, found in self.tags if name in (found.get("class") or "").split()]


@pytest.fixture
def digits(tmp_path):
    dataset = nf.data.open("digits")
    rows = dataset.parts["test"][::20]
    return write_embedded(tmp_path / "digits", dataset.labels[rows], rows, data={"name": "digits"})


@pytest.fixture
def folder(tmp_path):
    place = photos(tmp_path / "photos")
    dataset = nf.data.open("folder", str(place))
    data = {"name": "folder", "root": str(place)}
    return write_embedded(
        tmp_path / f"run of {NASTY.replace('/', '')}", dataset.labels, np.arange(len(dataset)), data=data
    )


def test_everything_about_a_run_is_on_the_page(digits):
    file = report(digits)
    assert file == digits / "report.html"
    page = Page(file)
    assert page.titles == [
        "Training curves",
        "Metrics",
        "Nearest neighbors",
        "Worst queries",
        "Map of unseen classes",
        "Pair weights of the loss",
        "Settings",
    ]
    text = " ".join(page.text)
    assert "1 min 15 s" in text
    assert 'name = "multi_similarity"' in text  # the recipe
    assert "versions.nearfar" in text  # the manifest


def with_verdict(folder, gains):
    """Give a run what its queries found before and after the training, and the verdict on it."""
    embedded = Run(folder).embeddings
    labels = embedded.labels.numpy()
    after = np.random.default_rng(0).uniform(0.4, 0.6, len(labels))
    before = after - np.asarray(gains)[np.unique(labels, return_inverse=True)[1]]
    queries = {"rows": embedded.rows.numpy(), "labels": labels}
    queries |= dict.fromkeys(verdict.METRICS, after) | {f"before {name}": before for name in verdict.METRICS}
    save_file(queries, folder / "queries.safetensors")
    file = folder / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"verdict": verdict.compare(queries)}))
    return folder


def test_a_page_opens_with_the_verdict_and_the_classes_that_gained_and_lost(folder):
    page = Page(report(with_verdict(folder, [0.1, -0.2, 0.05]), worst=1))
    assert page.titles[:4] == ["Before and after", "Training curves", "What to do next", "Metrics"]
    line = verdict.text(Run(folder).metrics)
    text = " ".join(page.text)
    assert text.index(line) < text.index("2 of 3 classes gained") < text.index("nearfar index build")
    assert re.findall(r'class="name up" x="[\d.]+" y="[\d.]+">([^<]+)<', page.source)[:3] == ["+10.0", "+5.0", "−20.0"]
    places = {attributes.get("id") for attributes in page.with_class("hits")}
    links = [attributes["href"].removeprefix("#") for tag, attributes in page.tags if tag == "a"]
    assert len(links) == 3
    assert set(links) <= places


def test_of_many_classes_the_strongest_changes_are_shown(tmp_path):
    labels = np.repeat(np.arange(40), 2)
    run = write_embedded(tmp_path / "run", labels, np.arange(80))
    gains = np.linspace(-0.1, 0.3, 40)
    page = Page(report(with_verdict(run, gains), queries=0)).source
    assert page.count('<circle class="ring"') == 16
    assert "… 24 more classes, +21.8 to −1.8 …" in page
    assert "30 of 40 classes gained" in page


def test_without_a_training_that_is_kept_no_class_has_changed(folder):
    run = with_verdict(folder, [0.0, 0.0, 0.0])
    metrics = Run(run).metrics | {"blend": {"share": 0.0, "folds": 1, "classes": 0}}
    (run / "metrics.json").write_text(json.dumps(metrics))
    page = Page(report(run))
    assert "Before and after" not in page.titles
    assert "the network was left as it was" in " ".join(page.text)


def test_the_page_asks_nothing_of_the_network_and_runs_nothing(folder):
    page = Page(report(folder))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "srcset", "xlink:href"):
                assert str(value).startswith(("data:image/", "#"))
    assert "url(" not in page.source
    assert "@import" not in page.source
    policies = [found["content"] for _, found in page.tags if found.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_names_that_are_markup_are_shown_as_text(folder):
    page = Page(report(folder))
    text = " ".join(page.text)
    assert "<b>bold<b>" in text
    assert "jay & wren" in text
    assert NASTY in text  # a note of the manifest
    assert '<script>alert("x")' in text  # the run's name
    assert any('"><img src=x>.png' in (found.get("title") or "") for found in page.with_class("hit"))


def test_metrics_and_intervals_are_those_of_the_embeddings(digits):
    run = Run(digits)
    found = measured(run)
    expected = nf.metrics.retrieval(run.embeddings.embeddings, run.embeddings.labels, per_query=True)
    assert found.values["recall@1"] == expected["recall@1"]
    assert found.values["nmi"] == 0.61  # as the run found it
    interval = nf.metrics.class_intervals(expected["per_query"], run.embeddings.labels)["map@r"]
    assert found.intervals["map@r"] == interval
    text = " ".join(Page(report(digits)).text)
    assert f"{100 * interval.low:.2f} – {100 * interval.high:.2f}" in text
    assert f"Intervals of 95 % are over {interval.classes} classes" in text


def test_frames_tell_whether_a_neighbor_is_of_the_class(digits):
    page = Page(report(digits, queries=5, worst=0))
    good, bad, asked = (len(page.with_class(kind)) for kind in ("good", "bad", "asked"))
    assert (asked, good + bad) == (5, 40)
    run = Run(digits)
    chosen = gallery.spread(run.embeddings.labels, 5)
    found = gallery.neighbors(run.embeddings.embeddings, chosen, None)
    labels = run.embeddings.labels
    hits = [labels[row] == labels[query] for query, rows in zip(chosen, found, strict=True) for row, _ in rows]
    assert good == sum(hits)
    marks = [attributes["aria-label"] for attributes in page.with_class("sign")]  # not by colour alone
    assert (marks.count("same class"), marks.count("another class")) == (good, bad)


def test_the_worst_queries_come_first(digits):
    page = Page(report(digits, queries=0, worst=3))
    assert "Nearest neighbors" not in page.titles
    assert len(page.with_class("asked")) == 3
    found = measured(Run(digits))
    shown = [float(number) for number in re.findall(r"AP ([\d.]+) %", " ".join(page.text))]
    assert shown == [round(100 * value, 1) for value in found.precision.sort().values[:3].tolist()]


def test_thumbnails_are_the_pictures(digits):
    dataset = nf.data.open("digits")
    uri, is_small = gallery.thumbnail(dataset, 3)
    assert is_small
    image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert np.array_equal(np.array(image), dataset.source.array[3].reshape(8, 8))


def test_vectors_are_drawn_as_squares(tmp_path):
    dataset = nf.data.open("digits", vectors=True)
    rows = dataset.parts["test"][::30]
    data = {"name": "digits", "settings": {"vectors": True}}
    run = write_embedded(tmp_path / "run", dataset.labels[rows], rows, data=data, network={"name": "linear", "dim": 8})
    page = Page(report(run))
    text = " ".join(page.text)
    assert "A vector is drawn as a square of its values." in text
    assert "vectors of 5 unseen classes" in text
    assert "the embedding of a vector" in text
    assert len([tag for tag, _ in page.tags if tag == "img"]) == len(page.with_class("hit")) > 0


def test_queries_look_in_their_gallery(tmp_path):
    dataset = nf.data.open("digits")
    rows = dataset.parts["test"][::10]
    run = write_embedded(tmp_path / "run", dataset.labels[rows], rows, gallery=True)
    found = Run(run)
    searched = found.searched
    (first,) = gallery.neighbors(found.embeddings.embeddings, [2], searched.embeddings, count=1)
    similarity = torch.nn.functional.cosine_similarity(found.embeddings.embeddings[2:3], searched.embeddings)
    assert [row for row, _ in first] == [int(similarity.argmax())]
    assert "Metrics" in Page(report(run)).titles


def test_a_run_under_way_has_a_page(tmp_path):
    run = write_embedded(tmp_path / "run", np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), finished=False)
    page = Page(report(run))
    assert page.titles == ["Training curves", "Pair weights of the loss", "Settings"]
    assert "not been evaluated yet" in " ".join(page.text)


def test_data_that_is_gone_leaves_numbers_of_rows(folder, tmp_path):
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    page = Page(report(folder))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert "The dataset could not be opened" in " ".join(page.text)


@pytest.mark.parametrize(("loss", "drawn"), [("proxy_anchor", True), ("group", False)])
def test_losses_with_proxies_have_a_weight_view_and_those_of_whole_batches_none(tmp_path, loss, drawn):
    labels = np.repeat(np.arange(5, 10), 4)
    page = Page(report(write_embedded(tmp_path / "run", labels, np.arange(20), loss={"name": loss})))
    assert ("Pair weights of the loss" in page.titles) is drawn
    assert ("a sample to the proxy of its class" in " ".join(page.text)) is drawn


def test_the_same_run_gives_the_same_page(digits, tmp_path):
    first, second = (report(digits, out=tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_a_map_keeps_far_groups_apart(method):
    points = torch.cat([torch.randn(20, 5, generator=torch.Generator().manual_seed(n)) * 0.1 + 5 * n for n in (0, 1)])
    places = gallery.flatten(points, method)
    assert places.shape == (40, 2)
    middle = places.reshape(2, 20, 2).mean(axis=1)
    spread = places.reshape(2, 20, 2).std(axis=1).max()
    assert np.linalg.norm(middle[0] - middle[1]) > 2 * spread


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"map": "som"}, "map is 'som'"),
        ({"queries": -1}, "queries is -1"),
        ({"out": "no/such/place.html"}, "cannot be"),
    ],
)
def test_bad_settings_are_named(digits, settings, message):
    with pytest.raises(ValueError, match=message):
        report(digits, **settings)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run: recipe\.toml is missing"):
        report(tmp_path)


def test_curves_are_read_from_the_log(digits):
    assert Run(digits).curve("test", "recall@1") == [(1.0, 0.5), (2.0, 0.6), (3.0, 0.7)]


def test_a_curve_starts_before_the_training_and_has_two_points_at_least(digits):
    (digits / "log.jsonl").write_text('{"epoch": 4, "metrics": {"test": {"recall@1": 0.7}}}\n')
    assert _curves(Run(digits, metrics={"test": {"recall@1": 0.7}})) == []
    before = {"before": {"recall@1": 0.5}, "test": {"recall@1": 0.7}}
    ((title, chart),) = _curves(Run(digits, metrics=before))
    assert title == "Recall@1"
    assert chart.count("<circle") == 2


def test_all_metrics_before_the_training_are_beside_those_after_it(digits):
    file = digits / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"before": {"recall@1": 0.5, "map@r": 0.1234}}))
    page = Page(report(digits)).source
    assert '<th scope="col" class="number">before, %</th>' in page
    assert '<td class="number">12.34</td>' in page


def test_a_long_name_of_a_class_leaves_the_similarity_visible(digits):
    page = Page(report(digits))
    assert re.search(r"<figcaption><b>[^<]*</b><span>\d\.\d\d</span></figcaption>", page.source)
    (clamped,) = re.findall(r"[^}]*\{[^}]*-webkit-line-clamp[^}]*\}", page.source)
    assert clamped.strip().startswith(".hit figcaption b {")


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-9, 1e-9], [1e12, 3e12], [0.0, 0.0, 1e-300]])
def test_charts_draw_whatever_numbers_there_are(values):
    points = list(enumerate(values))
    drawn = charts.line_chart([charts.Line("a", points), charts.Line("b", points)], title="t", x="x", y="y")
    places = [float(number) for number in re.findall(r'(?:c?x|c?y|y1)="(-?[\d.]+)"', drawn)]
    assert places
    assert all(0 <= place <= charts.WIDTH for place in places)
    assert "nan" not in drawn


def test_no_share_is_more_than_all():
    drawn = charts.line_chart([charts.Line("recall", [(1.0, 0.98)])], title="t", x="epoch", y="recall", percent=True)
    ticks = [float(each) for each in re.findall(r">(\d+)\s*%?</text>", drawn)]
    assert ticks
    assert max(ticks) <= 100
