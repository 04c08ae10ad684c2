"""What checks are made of: their registration, the device that they run on, and the rows that they print."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import tempfile
import time
import traceback
import typing

MARK = "\x01row "
CHECKS = {}
ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Check:
    """quick: part of --quick. alone: nothing else runs beside it. seconds: its bound. cuda: needs a real GPU. named: runs
    only as a part of another one."""

    name: str
    run: typing.Callable
    seconds: float
    quick: bool = True
    alone: bool = False
    cuda: bool = False
    named: bool = False


def check(name=None, **how):
    """Registers a check: a function of a Here. name: the function's, unless given."""

    def register(function):
        named = name or function.__name__.replace("_", "-")
        CHECKS[named] = Check(named, function, **how)
        return function

    return register


class Here:
    """What a check is given. device: of torch. test_accelerator: its library, where there is no GPU; else None. build: the
    tree with the command. folder: an empty one of its own."""

    def __init__(self, check, quick, build, out):
        import torch

        self.check, self.quick, self.build, self.out = check.name, quick, build, out
        self.folder = pathlib.Path(os.environ.get("SMARTINF_CHECK_FOLDER") or tempfile.mkdtemp())
        self.test_accelerator = None
        if torch.cuda.is_available():
            self.device = torch.device("cuda")
        else:
            self.test_accelerator = build / "tests/accelerator/libsmartinf_test_accelerator.so"
            where = ROOT / "tests/accelerator/test_accelerator.py"
            spec = importlib.util.spec_from_file_location("test_accelerator", where)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            self.device = module.register(str(self.test_accelerator))
        self.began = time.monotonic()

    def row(self, name, passed, **values):
        """Of this check. passed: None where it could not run; why= says so."""
        seconds, self.began = time.monotonic() - self.began, time.monotonic()
        found = {"check": f"{self.check}.{name}" if name else self.check, "passed": passed, **values}
        print(MARK + json.dumps(found | {"seconds": round(seconds, 2)}), flush=True)

    def compare(self, name, found, wanted):
        """A row: whether both functions return tensors of the same bits."""
        try:
            why = difference(found(), wanted())
        except Exception as error:  # noqa: BLE001  whatever it is, it is this row's
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.row(name, why is None, **({"why": why} if why else {}))

    def place(self, name):
        """A new folder for a state."""
        made = self.folder / name
        made.mkdir(parents=True)
        return str(made)


def in_memory(folder):
    """The place in the host's memory that belongs to a check's folder."""
    return f"/dev/shm/{pathlib.Path(folder).name}"


def run(name, quick, build, out):
    check = CHECKS[name]
    here = Here(check, quick, build, out)
    if check.cuda and here.test_accelerator is not None:
        here.row("", None, why="needs a GPU")
    else:
        check.run(here)


def difference(found, wanted):
    """None, or in words the first of two lists of tensors (on any device) that differ in a bit."""
    import torch

    if len(found) != len(wanted):
        return f"{len(found)} tensors instead of {len(wanted)}"
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        a, b = a.detach().cpu(), b.detach().cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"tensor {i}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
        if not torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)):
            at = (a != b).sum().item()
            return f"tensor {i}: {at} of {a.numel()} differ, by up to {(a.double() - b.double()).abs().max().item():.3g}"
    return None
