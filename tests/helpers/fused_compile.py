"""Compiles the fused kernels for a Hopper GPU, without one, and prints the bytes of shared memory that each needs."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nearfar.engine import triton_kernels as kernels

TYPES = {"height": "i32", "width": "i32", "dim": "i32", "per_split": "i32", "top": "i32", "bottom": "i32"}
INTEGERS = ("x_labels", "y_labels", "own", "where")
# Each kind of term, and each kind of value, in one of these.
TERMS = [("linear", "linear", "linear", "hinge"), ("circle", "softplus", "circle", "square"),
         ("none", "squared_hinge", "none", "none")]  # fmt: skip


def shared_memory(kernel: Any, constants: dict[str, Any], blocks: kernels.Blocks, vectors: str) -> int:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("x", "y"):
            return f"*{vectors}"
        return TYPES.get(name) or ("*i64" if name in INTEGERS else "fp32" if len(name) == 2 else "*fp32")

    names = kernel.arg_names
    signature = {name: kind(name) for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] in "*i"}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return int(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)


def main() -> None:
    found = {}
    for number, precision in enumerate(kernels.PRODUCTS):
        vectors = "bf16" if precision == "bfloat16" else "fp32"
        named = dict(zip(("P_LOGIT", "P_TOTAL", "N_LOGIT", "N_TOTAL"), TERMS[number], strict=True))
        same = {"POWER": number, "OWN": ("diagonal", "rows", "columns")[number], "PRODUCT": kernels.PRODUCTS[precision]}
        weights = {"BOUNDED": True, "FROM_ROWS": True, "FROM_COLUMNS": number == 0}
        blocks = kernels.SUM_BLOCKS[0]
        sizes = {"BM": blocks.rows, "BN": blocks.columns, "BK": blocks.inner}
        for name, kernel, constants in (
            ("extremes", kernels._extremes, same),
            ("sums", kernels._sums, same | named | {"BOUNDED": True, "SHIFTED": number > 0}),
            ("strip", kernels._strip, same | named | weights),
        ):
            found[f"{name}, {precision}"] = shared_memory(kernel, constants | sizes, blocks, vectors)
        blocks = kernels.PRODUCT_BLOCKS[precision][0]
        sizes = {"BM": blocks.rows, "BN": blocks.columns, "BK": blocks.inner, "BD": blocks.outer, "SUMS": number > 0}
        constants = same | named | weights | sizes
        found[f"products, {precision}"] = shared_memory(kernels._products, constants, blocks, vectors)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
