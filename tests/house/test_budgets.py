"""Small rooms: lines per file and per function."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "octavo").rglob("*.py"))
NAMES = [str(p.relative_to(ROOT)) for p in FILES]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_file_and_function_length(path):
    text = path.read_text()
    limit = 600 if "kernels" in path.parts else 400
    assert text.count("\n") <= limit, f"{path} has {text.count(chr(10))} lines, limit {limit}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 60, f"{path}:{node.lineno} {node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_dead_ends(path):
    """No stub, no bare except, no note to self, no environment read outside base/env.py."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            assert not any(word in token.string for word in ("TODO", "FIXME", "XXX")), f"{path}: {token.string}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno} bare except"
            silent = all(isinstance(line, ast.Pass) for line in node.body)
            broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            assert not (silent and broad), f"{path}:{node.lineno} swallows every error"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("OCTAVO_"):
            assert path.name in ("env.py",) or path.parent.name == "cli", f"{path}:{node.lineno} {node.value}"


def test_cli_commands_are_thin():
    for path in (ROOT / "octavo" / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name}"
