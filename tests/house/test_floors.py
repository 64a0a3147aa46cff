"""One law: a file imports strictly lower floors, or its own folder. Function-level imports count."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "octavo"
FLOORS = ["base", "formats", "kernels", "ops", "modules", "integrations", "workflows", "pipelines", "cli"]
MAY = {floor: set(FLOORS[:level]) for level, floor in enumerate(FLOORS)}
MAY["store"] = {"base", "formats"}
for upper in ("integrations", "workflows", "pipelines"):
    MAY[upper].add("store")
for upper in FLOORS[4:]:
    MAY[upper].discard("kernels")  # seen only by ops
MAY["cli"] = {"base", "workflows", "pipelines"}
MAY["testing"] = {"base", "formats"}

# The only folder that may import these, and only when called.
GUESTS = {"transformers", "peft", "trl", "accelerate", "lm_eval", "datasets", "huggingface_hub"}

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def floor(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    here = floor(path)
    if here in ("__init__", "__main__"):
        return
    for line, name in imports(path):
        top, *rest = name.split(".")
        if top == "octavo" and rest:
            there = rest[0]
            if there == "__version__":  # the package itself is below every floor
                continue
            own_folder = there == here and not (
                here == "workflows" and path.parent.name == "workflows" and is_workflow(rest)
            )
            assert own_folder or there in MAY[here], f"{path}:{line} {here} imports octavo.{'.'.join(rest)}"
        if top in GUESTS:
            assert here == "integrations", f"{path}:{line} only integrations may import {top}"


def is_workflow(rest: list[str]) -> bool:
    """octavo.workflows.NAME where NAME is a module beside the importer: workflow files never import each other."""
    return len(rest) > 1 and (PACKAGE / "workflows" / f"{rest[1]}.py").exists()


def test_every_folder_has_a_floor():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert folders <= set(MAY), folders - set(MAY)


def test_no_file_is_above_and_below_another():
    """Imports for type checkers alone count too."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    below = {name: {n for _, i in imports(path) if (n := module_of(i, files))} for name, path in files.items()}
    TopologicalSorter(below).prepare()  # CycleError names the files


def module_of(name: str, files: dict[str, Path]) -> str | None:
    """The file that an imported name is, or is in."""
    return next((n for n in (name, name.rpartition(".")[0]) if n in files), None)
