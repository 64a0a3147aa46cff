#!/usr/bin/env python3
"""Print the file map of README.md: every folder of the package with the first sentence of its docstring.

scripts/file_map.py            print it
scripts/file_map.py --write    put it between the two `<!-- map -->` lines of README.md
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ["base", "formats", "kernels", "ops", "modules", "store", "integrations", "workflows", "pipelines", "cli"]
BESIDE = {
    "benchmarks/": "one script per claim, JSON lines out",
    "docs/guide/": "a page per command, run by the tests",
    "docs/adr/": "decisions, one page each",
    "examples/": "small scripts, run by the tests",
    "scripts/": "environments for the Makefile, and this map",
    "tests/": "mirrors octavo/; tests/house holds the rules",
}


def file_map() -> str:
    rows = {}
    for floor in FLOORS:
        init = ROOT / "octavo" / floor / "__init__.py"
        if init.exists():
            text = " ".join((ast.get_docstring(ast.parse(init.read_text())) or "").split())
            sentence = re.split(r"(?<=[a-z)])\. ", re.sub(r"^F\d: ", "", text))[0].rstrip(".")
            rows[f"octavo/{floor}/"] = sentence[:1].lower() + sentence[1:]
    rows |= BESIDE
    width = max(map(len, rows))
    return "\n".join(["```text", *(f"{name:<{width}}  {what}" for name, what in rows.items()), "```"])


def replaced(readme: str) -> str:
    parts = readme.split("<!-- map -->")
    if len(parts) != 3:
        raise SystemExit("README.md needs two lines `<!-- map -->`")
    return f"{parts[0]}<!-- map -->\n{file_map()}\n<!-- map -->{parts[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        path = ROOT / "README.md"
        path.write_text(replaced(path.read_text()))
    else:
        print(file_map())
