"""`python -m experiments.benchmarks`: all in one run: engines, aggregation, field, growth, memory, FeTS2022, CLAIR."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from . import aggregation, clair, engines, field, growth, memory, segmentation


def main() -> None:
    """Measure, print tables with ratios, and save CSV files and plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes: about ten minutes instead of an hour")
    parser.add_argument("--data-dir", default=os.environ.get("DATA_DIR"), help="real data, for what trains on it")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    args = parser.parse_args()
    common = ["--out", str(args.out), *(["--quick"] if args.quick else [])]
    engines.main([*common, *(["--data-dir", args.data_dir] if args.data_dir else [])])
    aggregation.main(common)
    field.main(common)
    growth.main(common)
    memory.main(common)
    segmentation.main(common)
    clair.main(common)


if __name__ == "__main__":
    main()
