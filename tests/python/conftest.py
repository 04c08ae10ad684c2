"""The package comes from PYTHONPATH (ctest sets it) or from an installed wheel."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def device(tmp_path):
    """A directory for one optimizer's state."""
    return str(tmp_path / "device")


@pytest.fixture(autouse=True)
def close_optimizers():
    """Devices of one test do not linger into the next."""
    yield
    from smartinf import open_optimizers

    open_optimizers.close_all()
