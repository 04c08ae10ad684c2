"""The documents in files and folders: what is data there, and of which form (docs/data.md).

Used by make_token_files.py; where that is compiled into smartinf, this text stands in place of its import.
"""
import json
import os
import pathlib
import re

from bounded_tokenizer import BadInput
from conversations import DOCUMENT_KEYS, SPACE, is_conversation

LINES = {".jsonl", ".ndjson", ".jsonlines"}
TABLES = {".csv", ".tsv"}
# What a folder has beside its data.
CACHES = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
ABOUT_IT = re.compile(r"(README|LICEN[CS]E|COPYING|NOTICE|CITATION)(\.\w+)?", re.IGNORECASE)
OF_EDITORS = re.compile(r".*~|#.*#|.*\.(sw[a-p]|bak|orig|partial)")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# What is no text by its first bytes, and how it becomes one.
PACKED = {
    b"\x1f\x8b": "it is compressed by gzip. Unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd. Unpack it with unzstd",
    b"\xfd7zXZ": "it is compressed by xz. Unpack it with unxz",
    b"BZh": "it is compressed by bzip2. Unpack it with bunzip2",
    b"PK\x03\x04": "it is a zip archive. Unpack it with unzip",
    b"PAR1": "it is a Parquet table, which is not read. Make a .jsonl file of it (datasets: to_json)",
    b"ARROW1": "it is an Arrow table, which is not read. Make a .jsonl file of it (datasets: to_json)",
}


class Refused(Exception):
    """Ends the program; the message says why."""


class LeftOut(Exception):
    """A file of a folder that is no data."""


def found_files(paths, suffixes):
    """Files, each with whether it was named or is of a folder; and what of folders is left out, with the reason."""
    files, left_out, seen = [], [], set()

    def cannot(error):
        raise Refused(f"{error.filename}: {error.strerror}")

    for path in map(pathlib.Path, paths):
        if path.is_file():
            files.append((path, True))
            continue
        if not path.is_dir():
            raise Refused(f"no such file or folder: {path}")
        found = []
        for folder, folders, names in os.walk(path, onerror=cannot, followlinks=True):
            here = pathlib.Path(folder)
            place = os.stat(folder)
            if (place.st_dev, place.st_ino) in seen:
                folders.clear()
                left_out.append((here, "was there before"))
                continue
            seen.add((place.st_dev, place.st_ino))
            for name in list(folders):
                if name.startswith(".") or name in CACHES:
                    folders.remove(name)
                    left_out.append((here / name, "hidden" if name.startswith(".") else "a cache"))
            for name in names:
                file = here / name
                if suffixes and not name.endswith(tuple(suffixes)):
                    continue
                why = why_left_out(file, here == path and not suffixes)
                if why is None:
                    found.append(file)
                else:
                    left_out.append((file, why))
        seen.clear()
        files += [(file, False) for file in sorted(found)]
    return files, left_out


def why_left_out(file, on_top):
    if file.name.startswith("."):
        return "hidden"
    if OF_EDITORS.fullmatch(file.name):
        return "a copy or a part"
    if not file.is_file() and not file.is_symlink():
        return "no file"
    if on_top and ABOUT_IT.fullmatch(file.name):
        return "about the folder"
    if file.suffix.lower() in TABLES:
        return "a table"
    return None


def read_whole(path):
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"no UTF-8 text: {error}") from None


def contents_of(path, named, split_at, bounds):
    """Each document of a file: its place for messages, its bytes, and a string, a line of JSON or a value of JSON."""
    with open(path, "rb") as file:
        head = file.read(8192)
    suffixes = {suffix.lower() for suffix in path.suffixes}
    if head.startswith(LFS_POINTER):
        raise BadInput("it is a pointer of Git LFS, and not the data. Get the data with git lfs pull")
    packed = next((why for begin, why in PACKED.items() if head.startswith(begin)), None)
    if packed is not None:
        raise BadInput(packed) if named else LeftOut("no text")
    if b"\0" in head and head[:2] not in (b"\xff\xfe", b"\xfe\xff") and not named:
        raise LeftOut("no text")
    if suffixes & TABLES:
        raise BadInput("a table is not read. Make a .jsonl file of it, with a document on each line")
    if suffixes & LINES:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", len(line), line
        return
    size = path.stat().st_size
    with bounds.over(path, size):
        text = read_whole(path)
        values = values_of(text, named, ".json" in suffixes) if text.lstrip()[:1] in ("{", "[") else None
        if values is None and ".json" in suffixes and text.strip():
            raise BadInput("not JSON")
    if values is not None:
        for place, value in values:
            yield f"{path}:{place}", size if len(values) == 1 else len(json.dumps(value)), value
        return
    line = 1
    for part in [text] if split_at is None else text.split(split_at):
        if part.strip():
            yield f"{path}:{line}", len(part.encode()), part
        line += part.count("\n") + (split_at or "").count("\n")


def values_of(text, named, expected):
    """The documents in a text of JSON, with their lines; None: it is no JSON. expected: by the file's name."""
    decoder, found, at = json.JSONDecoder(), [], SPACE.match(text).end()
    line = 1 + text.count("\n", 0, at)
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if expected or found and all(is_document(value) for _, value in found):
                raise BadInput(f"not JSON: {error}") from None
            return None
        found.append((line, value))
        end = SPACE.match(text, end).end()
        line += text.count("\n", at, end)
        at = end
    if len(found) == 1:
        value = found[0][1]
        several = isinstance(value, list) and bool(value) and not is_conversation(value)
        if several and all(isinstance(entry, dict) or is_conversation(entry) for entry in value):
            return [(f"entry {number}", entry) for number, entry in enumerate(value, 1)]
        if not is_document(value):
            if not expected and not isinstance(value, dict):
                return None
            if not named:
                raise LeftOut("JSON without a document")
            raise BadInput("it is JSON, but there is no document in it")
    elif not expected and not all(isinstance(value, dict) or is_conversation(value) for _, value in found):
        return None
    return found


def is_document(value):
    return is_conversation(value) or isinstance(value, dict) and not DOCUMENT_KEYS.isdisjoint(value)
