"""Numbers for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Callable

from fake_index import FakeIndex, encoded, picture
from fastapi.testclient import TestClient

from nearfar.serve.prometheus import Metrics

LINE = re.compile(r'^[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)+\})? [0-9.e+-]+$')


def test_requests_are_counted_by_route_and_not_by_address(client: Callable[..., TestClient]) -> None:
    served = client(FakeIndex(9))
    for id in (1, 2, 99):
        served.get(f"/api/v1/items/{id}")
    served.get("/made/up")
    served.post("/api/v1/search", files={"image": encoded(picture(1))})
    served.post("/api/v1/search", files={"image": b"no"})
    text = served.get("/metrics").text
    assert 'nearfar_requests_total{method="GET",route="/api/v1/items/{id}",status="200"} 2' in text
    assert 'nearfar_requests_total{method="GET",route="/api/v1/items/{id}",status="404"} 1' in text
    assert 'route="other",status="404"} 1' in text
    assert "made/up" not in text
    assert "nearfar_index_items 9" in text
    assert "nearfar_uploads_refused_total 1" in text
    assert 'nearfar_batch_size_count{work="embed"} 1' in text
    assert re.search(r"^process_resident_memory_bytes [1-9]\d{6,}$", text, re.M)
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or LINE.match(line), line


def test_histograms_add_up() -> None:
    metrics = Metrics()
    for value in (0.5, 1.0, 1.5, 9.0):
        metrics.observe("size", "Sizes.", value, (1, 2), work="a")
    lines = [line for line in metrics.text().splitlines() if line.startswith("nearfar_size")]
    assert lines == [
        'nearfar_size_bucket{work="a",le="1"} 2',
        'nearfar_size_bucket{work="a",le="2"} 3',
        'nearfar_size_bucket{work="a",le="+Inf"} 4',
        'nearfar_size_sum{work="a"} 12',
        'nearfar_size_count{work="a"} 4',
    ]


def test_labels_are_escaped() -> None:
    metrics = Metrics()
    metrics.count("odd_total", "Odd.", word='a"b\\c\nd')
    assert 'nearfar_odd_total{word="a\\"b\\\\c\\nd"} 1' in metrics.text()
