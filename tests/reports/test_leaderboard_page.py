"""The leaderboard: what it shows, what it refuses to rank, and that it can be trusted as a file."""

import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from runs import write_board, write_run

from nearfar.bench import find, tournament
from nearfar.bench.comparison.ranking import experiments
from nearfar.bench.comparison.tables import Column, Table
from nearfar.reports import charts, leaderboard, pages

LOSSES = {"contrastive": 0.50, "proxy_anchor": 0.58, "n_pair": 0.47}


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Three losses and a baseline on two networks with two sizes, three seeds each."""
    folder = tmp_path_factory.mktemp("board")
    return write_board(folder, LOSSES, {"googlenet": 0.0, "resnet50": 0.08}, [64, 512], seeds=3)


@pytest.fixture(scope="module")
def shown(board):
    return leaderboard.html(find(board), title="Birds & <b>bees</b>")


def sections(text):
    """What stands under each title."""
    found = re.findall(r"<section[^>]*>.*?<h2>(.*?)</h2>(.*?)</section>", text, re.DOTALL)
    return {re.sub(r"<[^>]+>", "", title).strip(): content for title, content in found}


def rows(section):
    """Cells of all bodies of tables."""
    return [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)]
        for body in re.findall(r"<tbody>(.*?)</tbody>", section, re.DOTALL)
        for line in re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
    ]


def test_all_parts_are_there(shown):
    assert list(sections(shown)) == [
        "✓ Fair comparison",
        "Tournament",
        "Recall@1 by experiment",
        "Leaderboard",
        "By size of the embedding",
        "By network",
        "Convergence",
    ]


def test_the_tournament_is_that_of_all_experiments(board, shown):
    expected = tournament(find(board)).rows
    section = sections(shown)["Tournament"]
    assert [line[:2] for line in rows(section)] == [[row.loss, f"{row.average:.2f}"] for row in expected]
    assert f">{expected[0].loss} {expected[0].average:.2f}</text>" in section  # in the diagram
    assert "sizes of one dataset do not count" in section


def test_all_that_rank_first_stand_out(tmp_path):
    for dim, seed, loss in itertools.product((64, 128), range(3), ("nra", "raw")):
        write_run(tmp_path / f"{loss}{dim}{seed}", loss, 0.5, dim=dim, seed=seed)
        if not seed:  # with one seed, losses cannot be told apart
            write_run(tmp_path / "one" / f"{loss}{dim}", loss, 0.5, dim=dim)
    text = leaderboard.html(find(*sorted(tmp_path.glob("[nr]*"))))
    assert sections(text)["Recall@1 by experiment"].count("<strong>") == 4
    alone = sections(leaderboard.html(find(tmp_path / "one")))
    assert "<strong>" not in alone["Recall@1 by experiment"]
    assert "No ranks and no p: too few seeds: 1" in alone["Leaderboard"]


def test_an_overview_has_a_column_for_each_experiment_and_baselines_last(shown):
    found = rows(sections(shown)["Recall@1 by experiment"])
    assert [line[0] for line in found] == ["proxy_anchor", "contrastive", "n_pair", "frozen"]
    assert all(len(line) == 5 for line in found)


def test_a_leaderboard_has_intervals_repetitions_time_and_memory(board, shown):
    runs = [run for run in find(board) if run.network == "googlenet" and run.dim == 64]
    (one,) = experiments(runs)
    first, last = one.rows[0], one.rows[-1]
    assert (first.loss, first.rank, len(first.runs)) == ("proxy_anchor", 1, 3)
    assert first.high is not None
    assert first.low < first.score < first.high
    assert first.std is not None
    assert last.is_baseline
    assert last.rank is None
    line = next(line for line in rows(sections(shown)["Leaderboard"]) if line[0] == "proxy_anchor")
    assert line[1:3] == ["1", f"{100 * first.score:.2f}"]
    assert line[6] == "a"
    assert line[8:10] == ["1 min 19 s", "2,048"]


def test_losses_that_cannot_be_told_apart_share_a_band(tmp_path):
    for loss, score in (("nra", 0.5), ("raw", 0.5), ("margin", 0.9)):
        for seed in range(3):
            write_run(tmp_path / f"{loss}{seed}", loss, score, seed=seed)
    (ranking,) = experiments(find(tmp_path))
    drawn = leaderboard.ranking_chart(ranking)
    assert re.findall(r'text-anchor|class="tick up"[^>]*>([^<]+)<', drawn) == ["margin", "nra", "raw"]
    (band,) = re.findall(r'class="band" x1="[\d.]+" y1="([\d.]+)" x2="[\d.]+" y2="([\d.]+)"', drawn)
    heights = [float(y) for y in re.findall(r'<circle[^>]* cy="([\d.]+)"', drawn)]
    assert heights[0] < float(band[0]) < heights[1] < heights[2] < float(band[1])


def test_a_critical_difference_joins_ranks_that_are_close():
    ranks = {"a": 1.2, "b": 1.8, "c": 3.0}
    drawn = charts.rank_chart(ranks, 1.0, title="ranks")
    assert drawn.count('class="band"') == 2  # the ruler, and a with b
    assert "critical difference 1.00" in drawn
    assert charts.rank_chart(ranks, None, title="ranks").count('class="band"') == 0
    assert charts.rank_bands([1.0, 1.5, 2.2, 4.0], 1.0) == [(0, 1), (1, 2)]
    file = charts.as_file(drawn)
    assert ElementTree.fromstring(file).tag == "{http://www.w3.org/2000/svg}svg"


def test_plots_are_of_losses_by_size_network_and_epoch(shown):
    parts = sections(shown)
    assert parts["By size of the embedding"].count("<svg") == 2
    assert ">64</text>" in parts["By size of the embedding"]
    assert parts["By network"].count("<svg") == 2
    assert ">googlenet</text>" in parts["By network"]
    assert parts["Convergence"].count("<svg") == 4
    assert "validation classes" in parts["Convergence"]
    for title in ("By size of the embedding", "By network", "Convergence"):
        for loss in LOSSES:
            assert f">{loss}</text>" in parts[title]


def test_a_loss_has_the_same_colour_everywhere(shown):
    for loss in LOSSES:
        assert len(set(re.findall(rf'class="name (c\d+)"[^>]*>{loss}</text>', shown))) == 1


def test_names_at_the_ends_of_lines_do_not_cover_each_other(shown):
    drawn = [chart for chart in re.findall(r"<svg class=\"chart\".*?</svg>", shown) if 'class="name' in chart]
    assert drawn
    for chart in drawn:
        heights = sorted(float(height) for height in re.findall(r'class="name c\d+" x="\d+" y="([\d.]+)"', chart))
        assert len(heights) > 1
        assert all(below - above >= 12.9 for above, below in pairwise(heights))


# --- what is not fair --------------------------------------------------------------------------------------------


@pytest.fixture
def unlike(tmp_path):
    """Two losses that were trained with different learning rates."""
    write_run(tmp_path / "one", "triplet", 0.5)
    write_run(tmp_path / "two", "margin", 0.6, optimizer__lr=0.5)
    return tmp_path


def test_what_is_unfair_is_shown_with_the_reason_and_not_ranked(unlike):
    text = leaderboard.html(find(unlike))
    parts = sections(text)
    assert "optimizer.lr: " in parts["✗ Unfair comparisonUNFAIR"]
    assert "rank" not in re.findall(r"<span>(.*?)</span>", parts["Leaderboard"])
    assert [line[0] for line in rows(parts["Leaderboard"])] == ["margin", "triplet"]
    assert 'class="best"' not in text
    assert "Highest" not in text


def test_what_is_ranked_anyway_says_unfair_wherever_it_is_ranked(unlike):
    parts = sections(leaderboard.html(find(unlike), anyway=True))
    assert [line[:2] for line in rows(parts["LeaderboardUNFAIR"])] == [["margin", "60.00"], ["triplet", "50.00"]]
    assert all(title.endswith("UNFAIR") for title in parts)


# --- less than everything ----------------------------------------------------------------------------------------


def test_one_run_is_a_page(tmp_path):
    write_run(tmp_path / "one", "triplet", 0.5, validation=False, queries=False, memory=None, epochs=1)
    parts = sections(leaderboard.html(find(tmp_path)))
    assert list(parts) == ["✓ Fair comparison", "Leaderboard"]
    assert "No intervals" in parts["Leaderboard"]
    assert "memory, MiB" not in parts["Leaderboard"]


def test_losses_that_not_all_experiments_have_stay_out_of_the_tournament(tmp_path):
    write_board(tmp_path, LOSSES, {"resnet50": 0.0}, [64, 512], seeds=1)
    write_run(tmp_path / "more", "triplet", 0.9, dim=64)
    parts = sections(leaderboard.html(find(tmp_path)))
    assert "Only the 3 losses take part" in parts["Tournament"]
    assert "triplet" not in [line[0] for line in rows(parts["Tournament"])]
    assert ["triplet", "90.0", "–"] in rows(parts["Recall@1 by experiment"])


def test_a_loss_of_one_size_is_in_the_tables_and_not_among_the_lines(tmp_path):
    for dim in (64, 128):
        write_run(tmp_path / f"nra{dim}", "nra", 0.5 + dim / 1000, dim=dim)
    write_run(tmp_path / "triplet", "triplet", 0.6, dim=128)
    write_run(tmp_path / "margin", "margin", 0.4, dim=128)
    found = sections(leaderboard.html(find(tmp_path)))
    assert "nra" in found["By size of the embedding"]
    assert "triplet" not in found["By size of the embedding"]
    assert found["Leaderboard"].index("<details open><summary>128") > found["Leaderboard"].index("<details><summary>64")


def test_settings_of_a_grid_have_charts_of_their_own(tmp_path):
    for loss, classes, flip in itertools.product(("nra", "group"), (4, 16), (True, False)):
        settings = {"sampler__classes": classes, "augmentation__flip": flip}
        folder = write_run(tmp_path / f"{loss}{classes}{flip}", loss, 0.5 + classes / 100 + flip / 50, **settings)
        labels = {"loss": loss, "sampler.classes": str(classes), "augmentation.flip": str(flip).lower()}
        (folder / "cell.json").write_text(json.dumps({"labels": labels}), encoding="utf-8")
    parts = sections(leaderboard.html(find(tmp_path)))
    assert parts["By setting"].count("<svg") == 2
    assert "group, flip=True" in parts["By setting"]
    assert "nra, classes=16" in parts["By setting"]
    assert "the loss and its own settings, sampler.classes, augmentation.flip" in parts["✓ Fair comparison"]
    assert "By setting" not in sections(leaderboard.html(find(write_run(tmp_path / "plain", "nra", 0.5))))


def test_curves_are_of_what_selects(tmp_path):
    for loss in ("nra", "triplet"):
        folder = write_run(tmp_path / loss, loss, 0.5, selection__metric="map@r")
        log = folder / "log.jsonl"
        log.write_text(log.read_text(encoding="utf-8").replace("recall@1", "map@r"), encoding="utf-8")
    found = sections(leaderboard.html(find(tmp_path)))["Convergence"]
    assert "MAP@R of the validation classes after each evaluated epoch. This metric selects the epoch." in found
    write_run(tmp_path / "margin", "margin", 0.5)
    assert "selects the epoch" not in sections(leaderboard.html(find(tmp_path)))["Convergence"]


def test_without_validation_curves_are_of_the_test_and_the_page_says_what_that_means(tmp_path):
    write_run(tmp_path / "one", "triplet", 0.5, validation=False)
    assert "the last epoch is used" in sections(leaderboard.html(find(tmp_path)))["Convergence"]


def test_runs_without_a_test_and_unfinished_ones_are_named(tmp_path):
    write_run(tmp_path / "one", "triplet", 0.5)
    metrics = write_run(tmp_path / "trial", "margin", 0.6) / "metrics.json"
    metrics.write_text(json.dumps({"validation": {"recall@1": 0.9}, "seconds": 1.0}))
    (write_run(tmp_path / "begun", "margin", 0.6) / "metrics.json").unlink()
    text = leaderboard.write([tmp_path]).read_text()
    assert "1 runs have no recall@1 of the test classes" in text
    assert "begun is not finished" in text
    assert rows(sections(text)["Leaderboard"])[0][0] == "triplet"


def test_nothing_to_show_is_said(tmp_path):
    write_run(tmp_path / "one", "triplet", 0.5)
    with pytest.raises(ValueError, match="none of 1 runs has 'nmi' of the test classes"):
        leaderboard.html(find(tmp_path), metric="nmi")
    with pytest.raises(ValueError, match="needed is a file in a folder that exists"):
        leaderboard.write([tmp_path], tmp_path / "no" / "page.html")
    with pytest.raises(ValueError, match="places is empty"):
        leaderboard.write([])


# --- the file ----------------------------------------------------------------------------------------------------


class Balanced(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "circle", "line", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("circle", "line", "rect", "polyline"):
            assert self.open.pop() == tag


def test_the_page_is_complete_well_formed_and_fetches_nothing(shown):
    parser = Balanced()
    parser.feed(shown)
    assert parser.open == []
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://""", shown.split("</title>")[1])
    assert "Birds &amp; &lt;b&gt;bees&lt;/b&gt;" in shown


def test_names_from_runs_are_text(tmp_path):
    run = write_run(tmp_path / "one", "triplet", 0.5)
    nasty = '<script>alert("x")</script>'
    (run / "cell.json").write_text(json.dumps({"labels": {"loss": nasty, "network": nasty, "data": nasty}}))
    text = leaderboard.html(find(tmp_path), title=nasty)
    assert nasty not in text
    assert text.count("<script>") == 1


def test_only_its_own_script_may_run():
    import base64
    import hashlib

    source = pages.script_source()
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    text = pages.render("base.html", "a", script=True)
    assert f"script-src 'sha256-{digest}'" in text
    assert f"<script>{source}</script>" in text


def test_a_browser_sorts_numbers_as_numbers_and_words_as_words(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium")
    cells = [("b", 9.0), ("a", 10.0), ("c", None)]
    table = Table("", [Column("loss"), Column("score", 1)], cells)
    file = tmp_path / "page.html"
    page = pages.render("tuning.html", "a", script=True, figures=[], edges=[], history=[], settings=[], trials=table)
    file.write_text(page, encoding="utf-8")
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 390, "height": 800})
        complaints = []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.goto(file.as_uri())

        def order():
            return "".join(tab.locator("tbody tr th").all_inner_texts())

        heads = tab.locator("thead button")
        seen = [order()]
        for press in (1, 1, 0, 0):
            heads.nth(press).click()
            seen.append(order())
        browser.close()
    assert seen == ["bac", "abc", "bac", "abc", "cba"]
    assert complaints == []
