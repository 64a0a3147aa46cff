import pytest

from tests.kernels.host import COMPILER


@pytest.fixture(scope="session")
def host_folder(tmp_path_factory):
    """Where kernels compiled for the host go; a machine without a C++ compiler checks them on a GPU only."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("host-kernels")
