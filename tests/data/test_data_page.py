"""What docs/data.md shows runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_code_of_the_page_runs_from_top_to_bottom():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["images"].shape == (32, 3, 32, 32)
    assert names["classes"].unique(return_counts=True)[1].tolist() == [4] * 8
