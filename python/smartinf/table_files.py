"""Weights of tables in safetensors files, as folders of Hugging Face's models have them. Read and written some rows
at a time."""

import json
import os

import torch

from smartinf import tables
from smartinf.errors import DeviceError, UsageError
from smartinf.storage_options import absolute

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_REST = "model-rest.safetensors"  # of a model in one file, whose tables come beside it
_BYTES_AT_ONCE = 1 << 24
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def save_tables(model: torch.nn.Module, folder: str | os.PathLike) -> list[str]:
    """Adds the weights of a model's tables to `folder`, which model.save_pretrained(folder) has filled: one file a table,
    table-NAME.safetensors, and an index that names all files, so that from_pretrained(folder) has the whole model. To be
    called again after each save_pretrained(). Rows are those of now, in the table's type. The folder is made if it is
    missing, and then has the tables alone. Returns the files' names. Errors: UsageError for a model without tables."""
    moved = tables.of_model(model)
    if moved is None:
        raise UsageError("the model has no tables: smartinf.move_tables(model, [name]) makes them")
    folder = absolute(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        index = _index(folder)
        files = []
        for table in moved.tables:
            files.append(f"table-{table.name}.safetensors")
            _write(table, os.path.join(folder, files[-1]))
            index["weight_map"][f"{table.name}.weight"] = files[-1]
        _replace(os.path.join(folder, _INDEX), [json.dumps(index, indent=2).encode()])
        if os.path.exists(os.path.join(folder, _WHOLE)):  # transformers reads it rather than the index
            os.replace(os.path.join(folder, _WHOLE), os.path.join(folder, _REST))
    except OSError as error:
        raise DeviceError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return files


def _index(folder):
    """Of the files that are there, all of them but tables'."""
    whole, path = os.path.join(folder, _WHOLE), os.path.join(folder, _INDEX)
    if os.path.exists(whole):
        return {"metadata": {}, "weight_map": {key: _REST for key in _header(whole) if key != "__metadata__"}}
    if not os.path.exists(path):
        return {"metadata": {}, "weight_map": {}}
    with open(path, encoding="utf-8") as file:
        index = json.load(file)
    index.get("metadata", {}).pop("total_size", None)  # without the tables
    return index


def _header(path):
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def _write(table, path):
    row_bytes = table.shape[1] * table.dtype.itemsize
    header = {
        "__metadata__": {"format": "pt"},
        f"{table.name}.weight": {
            "dtype": _TYPES[table.dtype], "shape": list(table.shape), "data_offsets": [0, table.shape[0] * row_bytes]
        },
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def pieces():
        yield len(text).to_bytes(8, "little") + text
        count = max(1, _BYTES_AT_ONCE // row_bytes)
        for first in range(0, table.shape[0], count):
            rows = table.gather(torch.arange(first, min(first + count, table.shape[0])))
            yield rows.view(torch.uint8).numpy()

    _replace(path, pieces())


def _replace(path, pieces):
    """A file of its own until all of it is durable."""
    partial = f"{path}.partial"
    try:
        with open(partial, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


class StoredRows:
    """A tensor of a safetensors file, of which slices are read."""

    def __init__(self, path, name, shape):
        """path: of a file, or a folder of a model."""
        from safetensors import SafetensorError, safe_open

        path, there = absolute(path), []
        try:
            if os.path.isdir(path):
                index, path = os.path.join(path, _INDEX), os.path.join(path, _WHOLE)
                if os.path.exists(index) and not os.path.exists(path):
                    with open(index, encoding="utf-8") as text:
                        there = json.load(text)["weight_map"]
                    path = os.path.join(os.path.dirname(index), there[name]) if name in there else index
            if not path.endswith(".json"):
                self._file = safe_open(path, "pt")
                there = list(self._file.keys())
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DeviceError(f"{path} cannot be read: {error}") from error
        if name not in there:
            raise UsageError(f"{path} has no {name}; it has {', '.join(list(there)[:3])} ...")
        self._rows = self._file.get_slice(name)
        if list(self._rows.get_shape()) != list(shape):
            raise UsageError(f"{name} is {self._rows.get_shape()} in {path} and {list(shape)} in the model")

    def __getitem__(self, rows):
        return self._rows[rows]
