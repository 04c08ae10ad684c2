"""The package comes from PYTHONPATH (ctest sets it) or from an installed wheel."""

import importlib.util
import os

import forked
import pytest

# Before torch is imported, here and by programs: several threads would wait for each other by computing.
os.environ.setdefault("OMP_NUM_THREADS", "1")

NOT_RUN = 77  # what ctest shows as "Skipped"


def pytest_configure():
    if importlib.util.find_spec("torch") is None:
        pytest.exit("the package's tests need torch", returncode=NOT_RUN)


def pytest_sessionfinish(session, exitstatus):
    """Files that were skipped as a whole, for want of a package, count as not run."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = NOT_RUN


@pytest.fixture
def device(tmp_path):
    """A directory for one optimizer's state."""
    return str(tmp_path / "device")


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """Runs programs as `python -c` does, and does not import torch for each."""
    made = forked.Processes(tmp_path_factory.mktemp("processes"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def close_optimizers():
    """Devices of one test do not linger into the next."""
    yield
    from smartinf import open_optimizers

    open_optimizers.close_all()
