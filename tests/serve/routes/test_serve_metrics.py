"""Prometheus metrics."""

import re

from fake_index import FakeIndex, encoded, picture

LINE = re.compile(r'^[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)+\})? [0-9.e+-]+$')


def test_requests_are_counted_by_route_and_not_by_address(client):
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
    assert re.search(r"^process_resident_memory_bytes [1-9.]+\d*e\+0[789]$", text, re.M)
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or LINE.match(line), line
