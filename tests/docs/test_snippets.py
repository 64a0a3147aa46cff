"""Documentation that runs: every command and every Python snippet of README and guide, page by page, on a tiny model.

```bash      `octavo ...` runs with `demo` replaced by the tiny model; `make X` and extras of pip lines must exist
```yaml      a first line `# NAME.yaml` writes the block to that file
```python    runs with "demo" replaced likewise
```text      and ```json show output and are not run
"""

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.cli.main import app, run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# Lines that another test runs.
ELSEWHERE = {"octavo quickstart": "tests/pipelines", "octavo --help": "tests/cli"}


def blocks(page):
    return BLOCK.findall(page.read_text())


def lines(block):
    joined = block.replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip() and line.strip()[0] != "#"]


def check_make(line):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    wanted = [word for word in shlex.split(line)[1:] if "=" not in word]
    assert set(wanted) <= targets, line


def check_pip(line):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for group in re.findall(r"\[([\w,]+)\]", line):
        assert set(group.split(",")) <= set(extras), line


def run_line(line, model):
    if line.startswith("make "):
        check_make(line)
    elif line.startswith("pip "):
        check_pip(line)
    elif line not in ELSEWHERE:
        assert line.startswith("octavo "), f"nothing here can run: {line}"
        words = shlex.split(line)
        argv = [
            str(model) if word == "demo" and before not in ("--data", "--calibration") else word
            for before, word in pairwise(words)
        ]
        assert run(argv) == 0, line


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page(page, tmp_path, monkeypatch, tiny_llama):
    monkeypatch.chdir(tmp_path)
    for kind, block in blocks(page):
        if kind == "bash":
            for line in lines(block):
                run_line(line, tiny_llama)
        elif kind == "yaml" and (name := re.match(r"# ([\w-]+\.yaml)\n", block)):
            Path(name[1]).write_text(block.replace("model: demo", f"model: {tiny_llama}"))
        elif kind == "python":
            exec(compile(block.replace('"demo"', repr(str(tiny_llama))), page.name, "exec"), {})
        else:
            assert kind in ("text", "json", "yaml"), f"{page.name}: a block of kind '{kind}' is neither run nor output"


def test_there_is_a_page_for_every_command():
    import typer

    commands = set(typer.main.get_group(app).commands)
    assert commands | {"install", "concepts", "kernels", "snapshots", "decode"} == {page.stem for page in PAGES[1:]}


def test_pages_are_short():
    assert (ROOT / "README.md").read_text().count("\n") <= 150
    assert (ROOT / "CONTRIBUTING.md").read_text().count("\n") <= 100


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
