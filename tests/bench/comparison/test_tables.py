"""Tables as text, CSV, LaTeX and HTML."""

import csv
import io
import math
from html.parser import HTMLParser

import pytest

from nearfar.bench.comparison.tables import Column, Table
from nearfar.reports.pages import FORMATS, write_table

COLUMNS = (Column("loss"), Column("recall@1", 1), Column("dim", 0))
ROWS = [["proxy_anchor", 68.1125, 512], ["<b>raw</b> & co", None, 64], ["50 %_{}", math.nan, 64]]
FAIR = Table("Recall_1", COLUMNS, ROWS, ["a note & more"])
UNFAIR = Table("Recall", COLUMNS, ROWS, (), ["network.dim: 64 in a_b; 512 in c"])


class Text(HTMLParser):
    """What a reader sees, and which tags there are."""

    def __init__(self, page):
        super().__init__()
        self.words = []
        self.tags = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_unfair_says_so_in_every_format(format):
    assert "UNFAIR" in write_table(UNFAIR, format)
    assert "UNFAIR" not in write_table(FAIR, format)


def test_text_is_aligned():
    assert write_table(FAIR).splitlines() == [
        "Recall_1",
        "loss             recall@1  dim",
        "------------------------------",
        "proxy_anchor         68.1  512",
        "<b>raw</b> & co         –   64",
        "50 %_{}                 –   64",
        "note: a note & more",
    ]


def test_csv_keeps_numbers_and_marks_each_row():
    head, first, second, third = csv.reader(io.StringIO(write_table(UNFAIR, "csv")))
    assert head == ["verdict", "loss", "recall@1", "dim"]
    assert first == ["UNFAIR", "proxy_anchor", "68.1125", "512"]
    assert second == ["UNFAIR", "<b>raw</b> & co", "", "64"]
    assert third[2] == ""
    assert next(csv.reader(io.StringIO(write_table(FAIR, "csv")))) == ["loss", "recall@1", "dim"]


def test_latex_is_escaped():
    found = write_table(UNFAIR, "latex")
    assert r"proxy\_anchor & 68.1 & 512 \\" in found
    assert r"\textless{}b\textgreater{}raw\textless{}/b\textgreater{} \& co & -- & 64 \\" in found
    assert r"50 \%\_\{\}" in found
    assert r"\caption{\textbf{UNFAIR}: Recall. network.dim: 64 in a\_b; 512 in c}" in found
    assert found.count("{") == found.count("}")
    assert r"\begin{tabular}{lrr}" in found


def test_html_holds_text_and_no_markup_of_others():
    page = Text(write_table(UNFAIR, "html"))
    assert "<b>raw</b> & co" in page.words
    assert "b" not in page.tags
    assert page.tags.count("tr") == 4
    assert page.words.count("UNFAIR") == 1
    assert "UNFAIR: Recall" in page.words


def test_a_page_is_complete_and_asks_for_nothing():
    page = write_table(FAIR, "html")
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "")
    assert not {"script", "link", "img"}.intersection(Text(page).tags)


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="format is 'xml'; allowed are text, csv, latex, html"):
        write_table(FAIR, "xml")
