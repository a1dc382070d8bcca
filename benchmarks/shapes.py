"""What a GPU takes for the first batch of a shape, with cuDNN trying kernels out and without.

    python benchmarks/shapes.py

EfficientNet-Lite0 with a head of 512 dimensions, forward only, bfloat16, channels last. A size is seen with one setting
only, as what is made ready once stays so: sides of pictures differ, and milliseconds are to be compared by area.
"""

from __future__ import annotations

import time

import torch

from nearfar import networks

TRIES = ((False, 224), (False, 288), (True, 304), (True, 320), (False, 336))  # whether kernels are tried out, and side
LARGE, SMALL, REPEATS = 256, 36, 5


def seconds(model: torch.nn.Module, count: int, side: int) -> float:
    """Of one batch of pictures."""
    images = torch.randn(count, 3, side, side, device="cuda").contiguous(memory_format=torch.channels_last)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        model(images)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print a line for each try."""
    if not torch.cuda.is_available():
        raise SystemExit("this is about GPUs, and there is none")
    settings = {"dim": 512, "pooling": "avg+max", "freeze_batchnorm": True}
    model = networks.create("efficientnet_lite0", **settings).eval().to("cuda", memory_format=torch.channels_last)
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    for tried, side in TRIES:
        torch.backends.cudnn.benchmark = tried
        first, small = seconds(model, LARGE, side), seconds(model, SMALL, side)
        again = min(seconds(model, LARGE, side) for _ in range(REPEATS))
        print(
            f"{side} pixels, {'tried out' if tried else 'not tried'}: first {LARGE} in {first:.2f} s, "
            f"first {SMALL} in {small:.2f} s, {LARGE} again in {1000 * again:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
