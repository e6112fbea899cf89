"""What one matrix product costs, by kernel set, packed format and number of rows, beside plain reading of memory.

Microseconds are the best of several repeats; each repeat walks over so many copies of the matrix that no cache holds
them. A row count is free as long as its time is that of one row.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --sets avx512 --formats Q4K,Q6K --rows 1,2,4,6,8,12,16,256 --size 8960x1536
"""

from __future__ import annotations

import argparse
from itertools import product

from foredraft import _native

FORMATS = ["Q4S", "Q4A", "Q4K", "Q5S", "Q5A", "Q5K", "Q6K", "Q8S", "F16", "F32"]
COPIES_BYTES = 256 << 20  # far beyond any cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(_native.kernel_sets()))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,4,8,16,128")
    parser.add_argument("--size", default="8960x1536", help="outputs x inputs")
    parser.add_argument("--threads", type=int, default=_native.default_threads())
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    n, k = (int(part) for part in args.size.split("x"))
    rows = [int(part) for part in args.rows.split(",")]

    read = max(_native.time_reading(COPIES_BYTES, args.threads, args.repeats))
    print(f"{n} x {k}, {args.threads} threads; plain reading {read / 1e9:.1f} GB/s")
    print(f"{'set':9} {'format':6} " + " ".join(f"{f'{m} rows: us':>13} {'GB/s':>5} {'GMAC/s':>6}" for m in rows))
    for name, packed_format in product(args.sets.split(","), args.formats.split(",")):
        size = _native.packed_bytes(packed_format, n, k)
        copies = max(1, COPIES_BYTES // size)
        cells = []
        for m in rows:
            few = 2 if name == "portable" else max(1, copies * 16 // max(m, 16))  # no need to hide from caches then
            seconds = min(_native.time_matmul(name, packed_format, n, k, m, args.threads, few, args.repeats))
            cells.append(f"{seconds * 1e6:13.0f} {size / seconds / 1e9:5.1f} {n * k * m / seconds / 1e9:6.1f}")
        print(f"{name:9} {packed_format:6} " + " ".join(cells), flush=True)


if __name__ == "__main__":
    main()
