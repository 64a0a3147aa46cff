"""Phases: done once, resumed after a kill, refused in a folder that is not theirs."""

import json

import pytest

from octavo.base.errors import ConfigError, MismatchError
from octavo.pipelines.phases import Phases


@pytest.fixture
def job(tmp_path):
    said = []
    return lambda **settings: Phases(tmp_path / "job", "job", settings or {"model": "a"}, said.append, total=2), said


def test_a_phase_runs_once(job):
    make, said = job
    calls = []
    for _ in range(2):
        phases = make()
        assert phases.run("one", "First", lambda: calls.append(1) or {"ppl": 1.5}) == {"ppl": 1.5}
    assert calls == [1] and said == ["[1/2] First", "      0 s, ppl 1.5", "[1/2] First: done before"]
    assert set(phases.times) == {"one"} and phases.seconds >= 0


def test_a_failed_phase_is_repeated_without_its_leftovers(job, tmp_path):
    make, _ = job
    out = tmp_path / "job" / "out"

    def fail():
        out.mkdir()
        (out / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make().run("one", "First", fail, out)
    assert make().run("one", "First", lambda: {"left": out.exists()}, out) == {"left": False}


def test_other_settings_are_refused(job):
    make, _ = job
    make(model="a").run("one", "First", dict)
    with pytest.raises(MismatchError, match=r"model 'a'.*got 'b'"):
        make(model="b")


@pytest.mark.parametrize("kind", ["file", "full folder", "damaged"])
def test_a_folder_of_something_else_is_refused_and_untouched(job, tmp_path, kind):
    make, _ = job
    folder = tmp_path / "job"
    if kind == "file":
        folder.write_text("mine")
    else:
        folder.mkdir()
        (folder / ("job.json" if kind == "damaged" else "mine")).write_text("{")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"remove it|Remove"):
        make()
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_will_do(job, tmp_path):
    make, _ = job
    (tmp_path / "job").mkdir()
    make().run("one", "First", dict)
    assert json.loads((tmp_path / "job" / "job.json").read_text())["phases"].keys() == {"one"}


def test_nothing_outside_the_folder_is_removed(job, tmp_path):
    make, _ = job
    (tmp_path / "precious").touch()
    with pytest.raises(ConfigError, match="not inside"):
        make().run("one", "First", dict, tmp_path / "job" / ".." / "precious")
    assert (tmp_path / "precious").exists()


def test_a_job_that_fails_at_once_leaves_nothing(job, tmp_path):
    make, _ = job

    def fail():
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        make().run("one", "First", fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"settings": 5, "phases": {}}',
        '{"settings": {}, "phases": []}',
        '{"settings": {}, "phases": {"one": 1}}',
        '{"settings": {}, "phases": {"one": {"seconds": "x", "cpu_seconds": 1, "facts": {}}}}',
        '{"settings": {}, "phases": {"one": {"seconds": 1, "cpu_seconds": 1, "facts": []}}}',
    ],
    ids=lambda text: text[-30:],
)
def test_a_record_edited_by_hand_is_damaged(job, tmp_path, text):
    make, _ = job
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.json").write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        make()
