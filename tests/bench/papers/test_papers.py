"""What the five documents print."""

import pytest
from runs import finished

from nearfar import losses, mining, networks
from nearfar.bench import papers
from nearfar.bench.comparison.published import beside, catalog, nearest, printed

ALL = papers.tables()


@pytest.mark.parametrize(
    ("key", "number", "row", "column", "value"),
    [
        ("thesis", "6a", "Contrastive", "recall@1", 60.28),
        ("thesis", "6b", "ProxyAnchor", "recall@8", 90.63),
        ("thesis", "7c", "LiftedStructure", "recall@1", 64.28),
        ("thesis", "8d", "NPair", "recall@4", 77.86),
        ("thesis", "10c", "SoftTriple", "recall@1000", 98.53),
        ("thesis", "11", "Triplet", "average", 8.85),
        ("thesis", "12", "MultiSimilarity", "std", 0.59),
        ("thesis", "14", "90/10", "recall@1", 64.38),
        ("thesis", "16", "ProxyAnchor", "recall@1", 66.56),
        ("thesis", "19", "OurLoss", "recall@10", 90.01),
        ("thesis", "21d", "ProxyAnchor", "recall@1", 85.97),
        ("nra", "I-cub-64", "NRA (ours)", "recall@1", 57.6),
        ("nra", "I-sop-512", "Lifted", "recall@100", 92.7),
        ("nra", "II-sop", "Margin", "recall@1", 72.7),
        ("unified_view", "1-inshop", "RAW + SemiHard", "recall@1", 88.66),
        ("unified_view", "2-cars196", "RAW+VTHM", "recall@32", 99.36),
        ("unified_view", "3-inshop", "HDC", "recall@50", 93.1),
        ("ranked_list", "1-cars196", "RLL-(L,M,H)", "nmi", 71.8),
        ("ranked_list", "2", "Proxy NCA", "recall@10", None),
        ("ranked_list", "6", "M", "recall@1", 76.9),
        ("group", "1-cub", "Ours", "recall@1", 65.5),
        ("group", "2-sop", "Ours 5-ensemble", "nmi", 91.1),
    ],
)
def test_figures_are_as_printed(key, number, row, column, value):
    assert papers.table(key, number).value(row, column) == value


@pytest.mark.parametrize("table", ALL, ids=lambda table: f"{table.document}:{table.id}")
def test_a_table_holds_together(table):
    assert table.rows
    for row in table.rows:
        assert tuple(row.cells) == table.columns
        recalls = [row.cells[column] for column in table.columns if column.startswith("recall@")]
        known = [value for value in recalls if isinstance(value, float)]
        assert known == sorted(known)  # who is found among the first ten is found among the first hundred
        assert all(0 < value < 100 for value in known)
        assert row.network in (None, "resnet50_v2", "bn_inception×2", "bn_inception×5", *networks.names())
        for label in row.losses:
            name, _, form = label.partition("+")
            assert name in losses.names()
            assert form in ("", "batch", *mining.names())


def test_the_thesis_has_ten_losses_in_every_experiment():
    grids = [table for table in papers.tables("thesis") if table.id[-1] in "abcd"]
    assert len(grids) == 28
    assert all(len(table.rows) == 10 for table in grids)
    assert {(table.data, table.rows[0].network) for table in grids} == {
        ("cub", "resnet50"),
        ("cub", "bn_inception"),
        ("cub", "googlenet"),
        ("cars196", "resnet50"),
        ("cars196", "bn_inception"),
        ("cars196", "googlenet"),
        ("sop", "bn_inception"),
    }


def test_folds_of_table_13_give_its_row_of_table_12():
    values = [row.cells["recall@1"] for row in papers.table("thesis", "13").rows]
    mean = sum(value for value in values if isinstance(value, float)) / 10
    assert mean == pytest.approx(papers.table("thesis", "12").value("MultiSimilarity", "recall@1"), abs=0.006)


def test_what_cannot_be_is_missing_and_noted():
    table = papers.table("thesis", "10b")
    assert table.value("ArcFace", "recall@1") == 73.14
    assert table.value("ArcFace", "recall@10") is None
    assert any("64.56" in note for note in table.notes)
    assert papers.table("group", "2-cub").value("DE-DSP", "recall@8") is None


def test_cited_rows_are_told_from_own_ones():
    rows = {row.name: row for row in papers.table("ranked_list", "2").rows}
    assert (rows["Proxy NCA"].reference, rows["Proxy NCA"].own) == ("[19]", False)
    assert (rows["RLL-H"].own, rows["RLL-H"].dim, rows["RLL-(L,M,H)"].dim) == (True, 512, 1536)
    names = {row.name for row in papers.table("unified_view", "2-cub").rows if row.own}
    assert names == {"RAW+VTHM"}


def test_figures_are_found_by_what_they_are_of():
    (figure,) = papers.figures(
        loss="proxy_anchor", data="cub", network="bn_inception", dim=64, metric="recall@1", own=True
    )
    assert (figure.value, figure.reference) == (61.06, "thesis, Table 7a, row ProxyAnchor")
    cited = papers.figures(loss="margin", data="sop", network="resnet50_v2", metric="recall@1", own=False)
    assert [one.value for one in cited] == [72.7]


def test_wrong_names_are_answered_with_right_ones():
    with pytest.raises(ValueError, match=r"'thesys' \(did you mean 'thesis'\?\); allowed are thesis, nra"):
        papers.table("thesys", "7c")
    with pytest.raises(ValueError, match="thesis has no table '99'; it has 1, 2"):
        papers.table("thesis", "99")
    with pytest.raises(KeyError, match="did you mean 'ProxyAnchor'"):
        papers.table("thesis", "7c").value("ProxyAncor", "recall@1")


def test_runs_stand_beside_figures_of_their_size(tmp_path):
    run = finished(tmp_path / "a", score=0.63, overrides={"network.name": "bn_inception"})
    table = beside([run])
    names = [column.name for column in table.columns]
    assert [(row[names.index("printed in")], row[names.index("theirs")]) for row in table.rows] == [
        ("thesis, Table 7a, row ProxyAnchor", 61.06),  # of its own network first
        ("thesis, Table 6a, row ProxyAnchor", 62.93),
        ("thesis, Table 8a, row ProxyAnchor", 58.07),
    ]
    assert table.rows[0][names.index("difference")] == pytest.approx(1.94)


def test_a_label_of_a_grid_does_not_hide_the_loss(tmp_path):
    run = finished(
        tmp_path / "a",
        {"name": "raw", "mining": "valid_triplet"},
        overrides={"network.dim": 512},
        cell={"loss": "mine", "data": "birds", "network": "small"},
    )
    found = {figure.reference for figure in nearest(run)}
    assert "unified_view, Table 1-cub, row RAW+VTHM (ours)" in found
    assert "thesis, Table 7c, row MultiSimilarity" in found


def test_a_run_that_nobody_printed_is_shown_alone(tmp_path):
    table = beside([finished(tmp_path / "a", "circle")])
    assert table.rows[0][-1] is None
    assert table.notes == ["no paper prints recall@1 of circle on this dataset"]


def test_the_catalogue_has_every_table_and_each_can_be_shown():
    assert len(catalog().rows) == len(ALL)
    for table in ALL:
        shown = printed(f"{table.document}:{table.id}")
        assert len(shown.rows) == len(table.rows)
        assert shown.texts()
