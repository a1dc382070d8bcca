"""Prometheus metrics of a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class ServerMetrics:
    """Counters, histograms and gauges of one server, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "nearfar_requests_total", "HTTP requests.", ["method", "route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "nearfar_request_seconds",
            "Duration of HTTP requests.",
            ["method", "route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "nearfar_batch_size", "Requests in a batch.", ["work"], buckets=SIZES, registry=registry
        )
        self.uploads_refused = Counter(
            "nearfar_uploads_refused_total", "Uploads that could not be decoded.", registry=registry
        )
        self.index_items = Gauge("nearfar_index_items", "Items in the index.", registry=registry)
        self.waiting = Gauge("nearfar_waiting", "Requests waiting in a queue.", ["work"], registry=registry)
        ProcessCollector(registry=registry)

    def text(self) -> str:
        """Return all values in the Prometheus text format, version 0.0.4."""
        return generate_latest(self._registry).decode()
