"""Waiting for something or a coroutine, and making sure that nothing waits for the GPU."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


def wait_for(condition, seconds=60.0):
    """Until it holds; an error if it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.005)


def result_of(coroutine):
    """Run a coroutine in a thread: in the main one, the event loop of an open browser may run."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


@contextmanager
def no_waiting():
    """Any wait for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
