import re

import pytest

from octavo.kernels.cuda import loader
from octavo.ops import attention, decode, fused
from tests.kernels import host


@pytest.fixture(scope="session")
def host_folder(tmp_path_factory):
    """Where kernels compiled for the host go; a machine without a C++ compiler checks them on a GPU only."""
    if host.COMPILER is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("host-kernels")


@pytest.fixture
def on_host(host_folder, monkeypatch):
    """Backends launch on the emulator."""

    def launch(variant, grid, threads, arguments, x, overlap=False):
        waits = re.search(r"(wait_for|end_of)_previous_kernel\(\);", (loader.SOURCES / variant.source).read_text())
        assert waits or not overlap, f"{variant} may start before what it reads is written"
        host.launch(host_folder, variant, grid, threads, arguments)

    monkeypatch.setattr(loader, "launch", launch)


@pytest.fixture
def both(monkeypatch):
    """Call a function on its kernels and on plain torch."""

    def run(function, *args, **options):
        results = []
        for wanted in (True, False):
            for module in (attention, decode, fused):
                monkeypatch.setattr(module, "on_kernels", lambda x, wanted=wanted: wanted)
            results.append(function(*args, **options))
        return results

    return run
