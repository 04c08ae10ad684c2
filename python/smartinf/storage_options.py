"""The keywords that every optimizer of the package takes, with their types and defaults; see StorageOptimizer."""

import difflib
import math
import numbers
import os
import re
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias, TypedDict, get_args, get_origin

import torch

from smartinf.errors import UsageError
from smartinf.sizes import parse_bytes

Path: TypeAlias = str | os.PathLike[str]
Size: TypeAlias = int | float | str  # bytes, or text such as "512MiB"


class _Place(TypedDict):
    path: Path


class Device(_Place, total=False):
    """A device that is more than a path. threads: of its own; bandwidth: bytes per second, for its share
    of the state; capacity_bytes: at most so much is kept there."""

    name: str
    threads: int
    bandwidth: Size
    capacity_bytes: Size


Devices: TypeAlias = Path | Device | Sequence[Path | Device]


class Remote(TypedDict, total=False):
    """For devices of other machines, as [remote] in a recipe. certificate, key, ca: PEM files."""

    certificate: Path
    key: Path
    ca: Path
    reconnect_seconds: float
    deadline_seconds: float
    window: Size


def absolute(path: Path) -> str:
    """A path as a user gives it, for as long as it is used: a script may change its folder. Errors: UsageError for what
    only a shell expands."""
    path = os.fspath(path)
    made = os.path.abspath(path if os.path.exists(path) else os.path.expanduser(path))
    if not os.path.exists(made):
        if path.startswith("~") and made == os.path.abspath(path):
            raise UsageError(f"{path}: there is no such home folder; write ./{path} for a folder of that name")
        if re.search(r"\$[A-Za-z_{]", path):
            raise UsageError(f"{path}: variables in paths are expanded by shells only: os.path.expandvars() does it too")
    return made


def is_remote(device) -> bool:
    """Whether another machine has it (`smartinf serve`)."""
    return device["path"].startswith("grpc://")


def remote_options(given) -> dict:
    """`remote` as the core wants it; files that it does not name come from the environment, as for commands."""
    made = dict(given or {})
    for key in made:
        if key not in Remote.__annotations__:
            raise UsageError(unknown("remote", key, Remote.__annotations__))
    for name in ("certificate", "key", "ca"):
        file = made.get(name) or os.environ.get(f"SMARTINF_REMOTE_{name.upper()}", "")
        made[name] = absolute(file) if file else ""
    if "window" in made:
        made["window_bytes"] = parse_bytes(made.pop("window"), "window")
    return made


def local_paths(devices, what) -> list[str]:
    """Those of devices that are all of this machine. Errors: UsageError that names `what`."""
    listed = device_list(devices)
    for device in listed:
        if is_remote(device):
            raise UsageError(f"{device['path']}: {what} can only be on devices of this machine; give a directory")
    return [device["path"] for device in listed]


def device_list(devices) -> list[Device]:
    """`devices`, each as a dict with an absolute path."""
    if devices is None or isinstance(devices, (str, os.PathLike, dict)):
        devices = [] if devices is None else [devices]
    return [_device(device if isinstance(device, dict) else {"path": device}) for device in devices]


def _device(given) -> Device:
    if "path" not in given:
        raise UsageError(f'a device has no path: {given}. Give {{"path": "/nvme0/run", ...}}')
    made = given | {"path": os.fspath(given["path"])}
    if not is_remote(made):
        made["path"] = absolute(made["path"])
    for name, kind in (("threads", int), ("bandwidth", float), ("capacity_bytes", int)):
        if isinstance(value := given.get(name, 0), str) and name != "threads":
            value = parse_bytes(value, f"{name} of device {given['path']}")
        if not isinstance(value, numbers.Real) or not math.isfinite(value) or kind(value) != value:
            raise UsageError(f"{name}={value!r} of device {given['path']} is no {'whole ' if kind is int else ''}number")
        if name in given:
            made[name] = kind(value)
    return made


class StorageOptions(TypedDict, total=False):
    """With the value of each that is left out, unless that is None."""

    devices: Devices
    remote: Remote | None
    resume: Literal[True, False, None]
    state_format: Annotated[Literal["f32", "bf16", "q8", "q4"], "f32"]
    master: Annotated[Literal["f32", "m24", "bf16"], "f32"]
    compress: float | dict | None
    memory_budget: Annotated[Size | None, "512MiB"]
    gradient_budget: Size | None
    state_cache: Size | None
    gradient_type: Literal["f32", "bf16", None]
    durability: Annotated[Literal["step", "none"], "step"]
    max_grad_norm: float | None
    nonfinite: Annotated[Literal["raise", "skip", "apply"], "raise"]
    release_gradients: Annotated[bool, False]
    accumulation_steps: Annotated[int, 1]
    overlap: torch.nn.Module | Literal["none", "late", "early", "auto", None]
    model: torch.nn.Module | None
    where: Annotated[Literal["device", "host"], "device"]
    subgroup_elements: Annotated[int, 0]
    checksums: Annotated[bool, True]
    seed: Annotated[int, 0]
    process_group: object
    fused: bool | None
    foreach: bool | None
    capturable: Annotated[bool, False]
    differentiable: Annotated[bool, False]


def complete(given) -> dict:
    """Keywords with the values of those that are left out, or None. Errors: UsageError for a value that is not known."""
    made = {}
    for name, kind in StorageOptions.__annotations__.items():
        kind, default = get_args(kind) if get_origin(kind) is Annotated else (kind, None)
        made[name] = default if given.get(name) is None else given[name]
        known = get_args(kind) if get_origin(kind) is Literal else (made[name],)
        if made[name] not in known:
            raise UsageError(f"{name}={made[name]!r}: known are {', '.join(map(repr, known))}")
    return made


def unknown(what, key, known) -> str:
    """The text for a key that `what` does not have."""
    near = difflib.get_close_matches(str(key), sorted(known), 1)
    return f"{what} has no {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}")
