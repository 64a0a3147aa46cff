"""`octavo bench decode` with variants, batches and prompts of your own: a line a case, then JSON.

    python benchmarks/decode.py [--layers 32] [--batches 1,8] [--prompts 128,2048] [--only NAME ...] [--out FILE]

--no-overlap: kernels of a step are set up only after the one before has ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.base.hardware import caps_of
from octavo.ops import attention
from octavo.workflows.bench import MODEL, machine
from octavo.workflows.measures import decode
from octavo.workflows.planner.source import published


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", default="128,2048")
    parser.add_argument("--only", nargs="*", choices=list(decode.VARIANTS), default=list(decode.VARIANTS))
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    attention.OVERLAP = args.overlap
    report: dict[str, object] = {"machine": machine(str(caps_of("cuda"))), "layers": args.layers}
    print(json.dumps(report), flush=True)
    shape = published()[MODEL] | {"num_hidden_layers": args.layers}
    batches, prompts = ([int(size) for size in text.split(",")] for text in (args.batches, args.prompts))
    rows = []
    for row in decode.rows(shape, "cuda", args.only, batches, prompts, args.parts):
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
    report["rows"] = rows
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
