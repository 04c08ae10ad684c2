"""shim.c from Python: built with the system's compiler, told what to do, and its record read.

A record is every write, sync and change of names below one folder, in order. crash() makes from it, and
from a copy of the folder as it was before, what a power cut at some moment may leave on the medium: what
was synced is there; of the rest each write may be there, be lost, or be torn at 512 bytes, and changes of
names are there up to some moment. A new name is sure once its folder or its file was synced (as on ext4,
xfs and btrfs), a rename once its folder was.
"""
import os
import pathlib
import shutil
import struct
import subprocess

CALLS = ("open", "preadv2", "pwritev2", "write", "fdatasync", "fsync", "fallocate", "ftruncate", "rename",
         "mkdir", "unlink", "flock")
ERRORS = ("EIO", "ENOSPC", "EINTR", "EAGAIN", "EROFS", "EINVAL", "ENODEV")
# Kinds of faults beside errors, by what they are of. What a write says that it did, but did not:
LIES = ("dropped", "misdirected", "torn", "flipped")
KINDS = {"preadv2": ("short", "unaligned", "zero", "flipped"),
         "pwritev2": ("short", "unaligned", "zero", *LIES),
         "write": ("short", "zero")}
SECTOR = 512

_CREATED, _DATA, _SIZE, _SYNC, _MADE_FOLDER, _RENAMED, _REMOVED, _EXCHANGED = range(1, 9)
_HEADER = struct.Struct("<IIQQQII")


def build(folder):
    """The shim as a library in `folder`. Errors: RuntimeError with the compiler's words."""
    out = pathlib.Path(folder) / "shim.so"
    source = pathlib.Path(__file__).with_name("shim.c")
    made = subprocess.run([os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-o", out, source, "-ldl", "-lpthread"],
                          capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise RuntimeError("the shim cannot be built: " + made.stderr)
    return str(out)


class Record:
    """What was recorded below `root`, as a list of operations."""

    def __init__(self, path, root, inodes):
        """inodes: inodes_below(root), from before the recording began."""
        self.root, self.inodes = os.path.realpath(root), inodes
        self.operations = []  # (kind, durable, inode, offset, path, target, data)
        data = pathlib.Path(path).read_bytes()
        at = 0
        while at < len(data):
            kind, durable, inode, offset, length, path_length, target_length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = os.fsdecode(data[at:at + path_length])
            at += path_length
            target = os.fsdecode(data[at:at + target_length])
            at += target_length
            length = length if kind == _DATA else 0
            self.operations.append((kind, durable, inode, offset, name, target, data[at:at + length]))
            at += length

    def __len__(self):
        return len(self.operations)

    def data(self, cut):
        """What the first `cut` operations wrote, write by write."""
        return (data for kind, *_, data in self.operations[:cut] if kind == _DATA)


def inodes_below(root):
    root = os.path.realpath(root)
    return {os.path.relpath(os.path.join(folder, name), root): os.lstat(os.path.join(folder, name)).st_ino
            for folder, _, files in os.walk(root) for name in files}


class _File:
    """Contents on the medium, and what was written since the last sync."""

    def __init__(self, data=b""):
        self.data = bytearray(data)
        self.pending = []  # (offset, bytes), or (size, None)

    def put(self, offset, data):
        if data is None:
            size = offset
            del self.data[size:]
            self.data.extend(bytes(size - len(self.data)))
            return
        self.data.extend(bytes(max(0, offset + len(data) - len(self.data))))
        self.data[offset:offset + len(data)] = data

    def sync(self):
        for offset, data in self.pending:
            self.put(offset, data)
        self.pending.clear()

    def settle(self, fate, draw):
        for offset, data in self.pending:
            mine = draw.choice(("drop", "keep", "tear")) if fate == "tear" else fate
            if mine == "keep" or (mine == "tear" and data is None):
                self.put(offset, data)
            elif mine == "tear":
                for start in range(0, len(data), SECTOR):
                    if draw.random() < 0.5:
                        self.put(offset + start, data[start:start + SECTOR])
        self.pending.clear()


class _Folder:
    """Names as the process sees them, and as they are on the medium."""

    def __init__(self):
        self.now, self.durable = {}, {}

    def find(self, path):
        node = self
        for name in pathlib.PurePath(path).parts:
            node = node.now[name]
        return node


def _grow(before):
    folder = _Folder()
    for entry in os.scandir(before):
        if entry.is_dir(follow_symlinks=False):
            folder.now[entry.name] = _grow(entry.path)
        elif entry.is_file(follow_symlinks=False):
            folder.now[entry.name] = _File(pathlib.Path(entry.path).read_bytes())
    folder.durable = dict(folder.now)
    return folder


def _lay_down(folder, fate, draw, out):
    out.mkdir()
    for name, node in sorted(folder.durable.items()):
        if isinstance(node, _Folder):
            _lay_down(node, fate, draw, out / name)
        else:
            node.settle(fate, draw)
            (out / name).write_bytes(node.data)


def crash(before, record, cut, fate, draw, out):
    """Makes the folder `out`: what a power cut after the first `cut` operations leaves of record.root.

    before: a copy of that folder from when the recording began.
    fate: of what was not synced: "drop", "keep", or "tear" (each as `draw` has it)."""
    top = _grow(before)
    files = {inode: top.find(path) for path, inode in record.inodes.items()}
    waiting = []  # changes of names, each a list of (folder, name, node or None) that comes whole

    def split(path):
        path = pathlib.PurePath(os.path.relpath(path, record.root))
        return top.find(path.parent), path.name

    def change(*names):
        for folder, name, node in names:
            if node is None:
                folder.now.pop(name, None)
            else:
                folder.now[name] = node
        waiting.append(names)

    def keep(names):
        for folder, name, node in names:
            if node is None:
                folder.durable.pop(name, None)
            else:
                folder.durable[name] = node

    def keep_own_name(node):
        for names in [w for w in waiting if len(w) == 1 and w[0][2] is node]:
            keep(names)
            waiting.remove(names)
            keep_own_name(names[0][0])

    for kind, synced, inode, offset, path, target, data in record.operations[:cut]:
        if kind == _CREATED:
            files[inode] = _File()
            change((*split(path), files[inode]))
        elif kind == _MADE_FOLDER:
            change((*split(path), _Folder()))
        elif kind == _REMOVED:
            change((*split(path), None))
        elif kind in (_RENAMED, _EXCHANGED):
            (here, name), (there, new) = split(path), split(target)
            moved = here.now[name]
            change((here, name, there.now[new] if kind == _EXCHANGED else None), (there, new, moved))
        elif inode not in files and not (kind == _SYNC and offset):
            raise RuntimeError(f"operation {kind} at {offset} on a file that the shim did not see being made: {path or inode}")
        elif kind == _DATA:
            if synced:  # RWF_DSYNC: this write, and nothing that was written before it
                files[inode].put(offset, data)
            else:
                files[inode].pending.append((offset, data))
        elif kind == _SIZE:
            files[inode].pending.append((offset, None))
        elif kind == _SYNC and offset:  # of a folder
            folder = top.find(os.path.relpath(path, record.root))
            for names in [w for w in waiting if any(f is folder for f, _, _ in w)]:
                keep(names)
                waiting.remove(names)
            keep_own_name(folder)
        else:
            files[inode].sync()
            keep_own_name(files[inode])
    # A journal keeps the order: what is left of the changes of names is what came first.
    kept = {"drop": 0, "keep": len(waiting), "tear": draw.randint(0, len(waiting))}[fate]
    for names in waiting[:kept]:
        keep(names)
    out = pathlib.Path(out)
    shutil.rmtree(out, ignore_errors=True)
    _lay_down(top, fate, draw, out)
