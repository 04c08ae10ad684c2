"""The keywords that every optimizer of the package takes, for type checkers; see StorageOptimizer."""

import os
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

import torch

Path: TypeAlias = str | os.PathLike[str]
Size: TypeAlias = int | float | str  # bytes, or text such as "512MiB"


class _Place(TypedDict):
    path: Path


class Device(_Place, total=False):
    """A device that is more than a path. threads: of its own; bandwidth: bytes per second, for its share
    of the state; capacity_bytes: at most so much is kept there."""

    name: str
    threads: int
    bandwidth: float
    capacity_bytes: int


Devices: TypeAlias = Path | Device | Sequence[Path | Device]


def device_list(devices) -> list[Device]:
    """`devices`, each as a dict, with a path of the user's home written out."""
    if devices is None or isinstance(devices, (str, os.PathLike, dict)):
        devices = [] if devices is None else [devices]
    made = [dict(device) if isinstance(device, dict) else {"path": device} for device in devices]
    return [device | {"path": os.path.expanduser(os.fspath(device["path"]))} for device in made]


class StorageOptions(TypedDict, total=False):
    devices: Devices
    resume: bool | None
    state_format: Literal["f32", "bf16", "q8"]
    compress: float | dict | None
    memory_budget: Size | None
    gradient_budget: Size | None
    state_cache: Size | None
    gradient_type: Literal["f32", "bf16", None]
    durability: Literal["step", "none"]
    max_grad_norm: float | None
    nonfinite: Literal["raise", "skip", "apply"]
    release_gradients: bool
    accumulation_steps: int
    overlap: torch.nn.Module | Literal["none", "late", "early", "auto", None]
    model: torch.nn.Module | None
    where: Literal["device", "host"]
    subgroup_elements: int
    checksums: bool
    seed: int
    process_group: object
    fused: bool | None
    foreach: bool | None
    capturable: bool
    differentiable: bool
