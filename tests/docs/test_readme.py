"""The file map in README.md is what the script prints."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_file_map_is_current():
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "file_map.py"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    shown = (ROOT / "README.md").read_text().split("<!-- map -->")[1].strip()
    assert shown == printed, "run scripts/file_map.py --write"
