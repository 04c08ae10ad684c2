"""What the package promises by name: errors, types, descriptions, progress."""

import ast
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import typing

import pytest
import torch

import smartinf
from smartinf import _core, errors, progress
from smartinf.optimizers import StorageOptimizer

DOCS = pathlib.Path(__file__).parents[2] / "docs"
OPTIMIZERS = [smartinf.AdamW, smartinf.Adam, smartinf.SGD, smartinf.Adagrad, smartinf.Lion]


def test_the_family_of_errors_is_the_documented_one():
    table = re.findall(r"^\| `(\w+)` \| *(\w*) *\|", (DOCS / "python.md").read_text(), re.MULTILINE)
    documented = {name: base for name, base in table if name.endswith("Error")}
    family = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.Error) and kind is not errors.Error
    }
    assert documented.keys() == family.keys()
    for name, kind in family.items():
        assert getattr(smartinf, name) is kind
        assert name in smartinf.__all__
        assert (kind("x").code, kind("x").path, kind("x").advice) == ("", "", "")
        if documented[name]:
            bases = {base.__name__ for base in kind.__mro__}
            assert documented[name] in bases, name


def test_errors_carry_the_cores_text(device):
    """One of each kind that the core raises, with what failed, where, and what to do."""
    param = torch.nn.Parameter(torch.zeros(1000))
    with pytest.raises(smartinf.MemoryLimitError) as raised:
        smartinf.AdamW([param], devices=[device], memory_budget=1)
    assert raised.value.code == "out of memory"
    assert raised.value.advice in str(raised.value)
    smartinf.AdamW([param], devices=[device]).close()
    with pytest.raises(smartinf.MismatchError) as raised:
        smartinf.AdamW([torch.nn.Parameter(torch.zeros(2000))], devices=[device])
    assert device in str(raised.value)
    assert raised.value.advice in str(raised.value)
    for file in pathlib.Path(device).rglob("*"):
        if file.is_file():
            data = bytearray(file.read_bytes())
            data[:] = os.urandom(len(data))
            file.write_bytes(data)
    with pytest.raises(smartinf.CorruptError) as raised:
        smartinf.AdamW([param], devices=[device], resume=True)
    assert raised.value.path.startswith(device)
    assert raised.value.code == "corrupt"
    with pytest.raises(smartinf.DeviceError) as raised:
        smartinf.AdamW([param], devices=["/proc/no/such/place"])
    assert isinstance(raised.value, OSError)
    assert "/proc/no" in str(raised.value)


def test_the_core_refuses_what_it_does_not_know(device):
    for options, said in (
        ({"memory_budget_byte": 1}, "unknown option 'memory_budget_byte'; did you mean memory_budget_bytes?"),
        ({"seed": 0.5}, "seed is 0.5 and must be a whole number"),
        ({"devices": [{"path": device, "bandwith": 1.0}]}, "a device has the unknown option 'bandwith'"),
        ({"compress": {"densty": 0.1}}, "compress has the unknown option 'densty'"),
    ):
        with pytest.raises(smartinf.UsageError, match=said):
            _core.Updater({"devices": [{"path": device}]} | options, ["w"], [[70_000]])
    with pytest.raises(smartinf.UsageError, match="unknown option 'capacity'.*capacity_bytes"):
        smartinf.AdamW([torch.nn.Parameter(torch.ones(9))], devices={"path": device, "capacity": 1 << 30})
    updater = _core.Updater({"devices": [{"path": device, "bandwidth": 1.0}]}, ["w"], [[70_000]])
    values = torch.zeros(70_000)
    updater.initialize(lambda i: (values.data_ptr(), "f32"), "")
    updater.begin_step()
    updater.put_gradients([0], [values.data_ptr()], ["f32"])
    updater.finish_gradients(1.0)
    with pytest.raises(smartinf.UsageError, match="a group has the unknown option 'weight_decy'"):
        updater.start_update(1, 1.0, [{"lr": 0.1, "weight_decy": 0.1, "step": 1}], "f32", values.data_ptr())
    updater.close()


def test_a_device_is_refused_by_what_is_wrong_with_it(device):
    def make(**options):
        return smartinf.AdamW([("w", torch.nn.Parameter(torch.zeros(8)))], devices=[options])

    for options, says in (
        ({"threads": 2}, "no path.*threads"),
        ({"path": device, "bandwidth": "fast"}, 'bandwidth of device .* is not a size.*"2GB"'),
        ({"path": device, "bandwidth": [1]}, "bandwidth=\\[1\\] of device .* is no number"),
        ({"path": device, "bandwidth": float("nan")}, "bandwidth=nan of device .* is no number"),
        ({"path": device, "capacity_bytes": 0.5}, "capacity_bytes=0.5 of device .* is no whole number"),
        ({"path": device, "threads": "2"}, "threads='2' of device .* is no whole number"),
    ):
        with pytest.raises(smartinf.UsageError, match=says):
            make(**options)
    make(path=device, bandwidth="1GB", capacity_bytes="64MiB", threads=1).close()


def test_stubs_name_what_the_core_has():
    package = pathlib.Path(_core.__file__).parent
    assert (package / "py.typed").exists()
    stub = ast.parse((package / "_core.pyi").read_text())

    def defined(body):
        return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}

    (updater,) = [node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "Updater"]
    for there, named in ((_core, defined(stub.body)), (_core.Updater, defined(updater.body))):
        public = {name for name in vars(there) if not name.startswith("_")}
        assert public <= named


def test_type_checkers_know_every_keyword():
    from smartinf.storage_options import StorageOptions

    for optimizer in (StorageOptimizer, *OPTIMIZERS):
        assert inspect.signature(optimizer.__init__).parameters["storage"].annotation == typing.Unpack[StorageOptions]
    for optimizer in OPTIMIZERS:
        for p in inspect.signature(optimizer.__init__).parameters.values():
            assert p.name == "self" or p.annotation is not p.empty, (optimizer, p.name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_option_is_described(optimizer):
    """The reference is `python -m pydoc`: each option stands in its class's text or in the shared one."""
    from smartinf.storage_options import StorageOptions

    own = [n for n in inspect.signature(optimizer.__init__).parameters if n not in ("self", "params", "storage")]
    for kind, names in ((optimizer, own), (StorageOptimizer, StorageOptions.__annotations__)):
        for name in names:
            assert re.search(rf"\b{name}\b", kind.__doc__), f"{kind.__name__}: {name}"
    assert "Source: " in optimizer.__doc__
    assert "Errors: " in StorageOptimizer.__doc__


def test_everything_public_is_described():
    sources = pathlib.Path(smartinf.__file__).parent
    for path in sources.glob("*.py"):  # read, not imported: hf needs transformers, which takes its time
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and path.stem in ("errors", "hf", "optimizers"):
                assert node.name.startswith("_") or ast.get_docstring(node), node.name
    for kind in (StorageOptimizer, *OPTIMIZERS):
        for name, method in vars(kind).items():
            assert name.startswith("_") or not inspect.isfunction(method) or method.__doc__, name


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(("rank", "shown"), [(0, True), (1, False)])
def test_long_work_shows_progress_on_rank_0(rank, shown, device, tmp_path, monkeypatch):
    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_WORTH_ELEMENTS", 1)
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = smartinf.AdamW([param], devices=[device])
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer._session.ranks.rank = rank
    optimizer.save_checkpoint(tmp_path / "saved")
    assert ("Saving optimizer state" in terminal.text) == shown
    if shown:
        assert "100%" in terminal.text
        optimizer.load_checkpoint(tmp_path / "saved")
        assert "Loading optimizer state" in terminal.text


def test_the_core_module_shows_nothing_but_its_own_name():
    """The server's SSL_read is in its archives: another library of the process must not find that one."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("binutils are not installed")
    listed = subprocess.run([nm, "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True).stdout
    strong = [line.split()[-1] for line in listed.splitlines() if " T " in line]
    assert strong == ["PyInit__core"]
