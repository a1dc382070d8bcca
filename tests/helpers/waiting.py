"""Waiting for something, and making sure that nothing waits for the GPU."""

import time
from contextlib import contextmanager

import torch


def wait_for(condition, seconds=60.0):
    """Until it holds; an error if it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.005)


@contextmanager
def no_waiting():
    """Any wait for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
