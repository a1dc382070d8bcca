"""Connects to a Ray cluster."""

from __future__ import annotations

from typing import Any


def connect(address: str | None = None) -> tuple[Any, bool]:
    """Connect to a Ray cluster, unless this process already is."""
    try:
        import ray
    except ImportError:
        raise ImportError("engine 'ray' needs the package ray; install it with: pip install 'nearfar[ray]'") from None
    own = not ray.is_initialized()
    if own:
        ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False)
    return ray, own
