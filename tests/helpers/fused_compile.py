"""Compiles the fused kernels for a Hopper GPU, without one, and prints the bytes of shared memory that each needs.

The losses call the kernels as on a GPU. A driver that knows no more than the target compiles them and launches nothing.
"""

import json
from contextlib import suppress

import torch
from fused_cases import CASES, kernels, make_batch, outcome
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nearfar.engine import programs

# Each measure, and most kinds of terms.
CHOSEN = [("multi_similarity", "float32"), ("circle", "tf32"), ("contrastive, distance, raw vectors", "bfloat16"),
          ("margin, all", "float32"), ("nt_xent", "bfloat16"), ("triplet, semi_hard", "float32"),
          ("triplet, all", "float32"), ("triplet, all, soft", "tf32")]  # fmt: skip


class Driver:
    """The part of a driver of Triton that compiling needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def is_float32(batch):
    return batch.embeddings.dtype == torch.float32


def main():
    found = {}
    launch = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **named):
        kernel = launch(self, *arguments, grid=grid, warmup=True, **named)
        found[f"{self.__name__}, {name}"] = int(kernel.metadata.shared)
        return kernel

    driver.set_active(Driver())
    JITFunction.run = compile_only
    programs.applies = is_float32
    for name, precision in CHOSEN:
        for gallery, dim in ((0, 64), (301, 160)):
            # The results are whatever was in memory, also where they are numbers of columns.
            with kernels(precision), suppress(IndexError):
                outcome(CASES[name](), make_batch(180, dim, gallery=gallery, classes=60), torch.float32)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
