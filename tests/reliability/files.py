"""Trials that change what lies on a device while nobody runs: flips, damage, repair, hostile metadata."""
import json
import os
import shutil
import socket

from machine import BEGUN, KINDS, OLDER, state_of
from outcomes import Failure, Outcome
from store_file import FIELDS, LAYOUT_FIELDS, STRIDE, SUPERBLOCK_BYTES, SUPERBLOCKS, StoreFile
from trials import scenario

FLIPPED = ("f32", "f32", "two", "topk", "q8", "bf16")


def flip(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@scenario(count=330, short=3)
def flips(trial):
    """One bit of one device; half of them in metadata."""
    kind = KINDS[FLIPPED[trial.index % len(FLIPPED)]]
    run = trial.machine.begun(kind, trial.folder)
    path = state_of(run, trial.draw.randrange(kind.devices))
    store = StoreFile(path)
    if trial.draw.random() < 0.5:
        _, offset, length = trial.draw.choice(store.metadata())
    else:
        offset, length = store.state_at, len(store.data) - store.state_at
    flip(path, 8 * offset + trial.draw.randrange(8 * length))
    return trial.machine.judge(kind, run)


# --- structured damage: each changes the run's folder; what it returns must come of it, None: either ---


def _span(store, draw):
    length = draw.choice((512, 4096, 65536, 262144))
    where = draw.randrange(store.state_at // 512, (len(store.data) - length) // 512) * 512
    return where, length


def swapped_blocks(trial, kind, run):
    store = StoreFile(state_of(run))
    (a, length), (b, _) = _span(store, trial.draw), _span(store, trial.draw)
    b = min(b, len(store.data) - length)
    first, second = store.data[a:a + length], store.data[b:b + length]
    store.data[a:a + length], store.data[b:b + length] = second, first
    store.save()


def misdirected_block(trial, kind, run):
    store = StoreFile(state_of(run))
    (a, length), (b, _) = _span(store, trial.draw), _span(store, trial.draw)
    b = min(b, len(store.data) - length)
    store.data[b:b + length] = store.data[a:a + length]
    store.save()


def stale_region(trial, kind, run):
    store = StoreFile(state_of(run))
    older = state_of(trial.machine.history(kind)[OLDER]).read_bytes()
    where, length = (_span(store, trial.draw) if trial.draw.random() < 0.7 else
                     trial.draw.choice(store.metadata())[1:])
    store.data[where:where + length] = older[where:where + length]
    store.save()


def filled_region(trial, kind, run):
    store = StoreFile(state_of(run))
    where, length = (_span(store, trial.draw) if trial.draw.random() < 0.7 else
                     trial.draw.choice(store.metadata())[1:])
    store.data[where:where + length] = bytes([trial.draw.choice((0, 255))]) * length
    store.save()


def truncated(trial, kind, run):
    size = state_of(run).stat().st_size
    os.truncate(state_of(run), trial.draw.choice((0, 1, 4096, size // 2, size - 4096, size - 1)))


def extended(trial, kind, run):
    with open(state_of(run), "ab") as file:
        file.write(trial.draw.randbytes(trial.draw.choice((1, 4096, 100_000))))


def torn_superblocks(trial, kind, run):
    """Some copies half from an older step, and some gone."""
    store = StoreFile(state_of(run))
    older = state_of(trial.machine.history(kind)[OLDER]).read_bytes()
    for copy in range(SUPERBLOCKS):
        at = copy * STRIDE
        fate = trial.draw.choice(("whole", "torn", "gone"))
        if fate == "torn":
            cut = 512 * trial.draw.randrange(0, 8)
            store.data[at + cut:at + SUPERBLOCK_BYTES] = older[at + cut:at + SUPERBLOCK_BYTES]
            store.data[at + 64:at + 128] = older[at + 64:at + 128]
        elif fate == "gone":
            store.data[at:at + SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)
    store.save()


def devices_swapped(trial, kind, run):
    if kind.devices > 1:
        state_of(run, 0).rename(run / "aside")
        state_of(run, 1).rename(state_of(run, 0))
        (run / "aside").rename(state_of(run, 1))


def device_of_another_run(trial, kind, run):
    other = trial.folder / "other"
    trial.machine.train(kind, other, BEGUN)
    index = trial.draw.randrange(kind.devices)
    shutil.copy(state_of(other, index), state_of(run, index))


def older_device(trial, kind, run):
    index = trial.draw.randrange(kind.devices)
    shutil.copy(state_of(trial.machine.history(kind)[OLDER], index), state_of(run, index))


def copied_device(trial, kind, run):
    shutil.copy(state_of(run, 0), state_of(run, kind.devices - 1).with_name("copy"))
    os.replace(state_of(run, kind.devices - 1).with_name("copy"), state_of(run, kind.devices - 1))


def missing_device(trial, kind, run):
    if kind.devices > 1:  # of one device alone: a run that has not begun
        state_of(run, trial.draw.randrange(kind.devices)).unlink()


def linked(trial, kind, run):
    state = state_of(run)
    state.rename(run / "elsewhere")
    if trial.draw.random() < 0.5:
        state.symlink_to(run / "elsewhere")
    else:
        os.link(run / "elsewhere", state)


def linked_twice(trial, kind, run):
    """Both devices are one file."""
    if kind.devices > 1:
        state_of(run, 1).unlink()
        os.link(state_of(run, 0), state_of(run, 1))


def odd_kind(trial, kind, run):
    state = state_of(run, trial.draw.randrange(kind.devices))
    odd = trial.draw.choice(("folder", "socket", "null", "dangling", "text", "loop", "fifo", "fifo"))
    state.unlink()
    if odd == "folder":
        state.mkdir()
    elif odd == "socket":
        with socket.socket(socket.AF_UNIX) as unix:
            here = os.open(state.parent, os.O_PATH)
            unix.bind(f"/proc/self/fd/{here}/{state.name}")  # a socket's own path is at most 108 bytes
            os.close(here)
    elif odd == "fifo":
        os.mkfifo(state)
    elif odd == "null":
        state.symlink_to("/dev/null")
    elif odd == "dangling":
        state.symlink_to(run / "nowhere")
    elif odd == "loop":
        state.symlink_to(state)
    else:
        state.write_text("this is no state\n" * 1000)


DAMAGE = (swapped_blocks, stale_region, torn_superblocks, older_device, device_of_another_run, odd_kind,
          devices_swapped, misdirected_block, filled_region, truncated, extended, copied_device,
          missing_device, linked, linked_twice)


@scenario(count=105, short=3)
def damage(trial):
    """Damage with a structure; every sort of it in turn."""
    kind = KINDS[trial.draw.choice(("f32", "two", "two", "topk"))]
    run = trial.machine.begun(kind, trial.folder)
    harm = DAMAGE[trial.index % len(DAMAGE)]
    harm(trial, kind, run)
    return trial.machine.judge(kind, run, foreign=harm is device_of_another_run)


@scenario(count=32, short=1)
def repair(trial):
    """fsck --repair after damage to one to four copies of metadata, then training."""
    kind = KINDS[trial.draw.choice(("f32", "two", "topk"))]
    run = trial.machine.begun(kind, trial.folder)
    store = StoreFile(state_of(run))
    for _, offset, length in trial.draw.sample(store.metadata(), trial.draw.randint(1, 4)):
        start = trial.draw.randrange(length)
        end = min(length, start + trial.draw.choice((1, 16, 512)))
        store.data[offset + start:offset + end] = trial.draw.randbytes(end - start)
    store.save()
    step, sound, done = trial.machine.fsck(trial.machine.devices(kind, run), "--repair")
    if step is not None:
        if not sound or done.code != 0:
            raise Failure(f"the state is not lost, and was not repaired: {done.text}")
        _, sound, done = trial.machine.fsck(trial.machine.devices(kind, run))
        if not sound:
            raise Failure(f"not sound after a repair: {done.text}")
    return trial.machine.judge(kind, run)


# --- hostile metadata: made on purpose, with right checksums ---------------------------------------------

_ODD_NUMBERS = (0, 1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**36, 2**40, 2**48, 2**63, 2**64 - 1)


def _odd_description(trial, text):
    description = json.loads(text)
    ranges = description["space"]["ranges"]
    choice = trial.draw.choice(("name", "shape", "rule", "devices", "group", "empty", "twice", "type", "bytes"))
    one = trial.draw.choice(ranges)
    if choice == "name":
        one["name"] = trial.draw.choice(("", "x" * 100_000, "../../etc/passwd", ranges[0]["name"],
                                          "\033[2J\033]0;title\007", "\x9b31m"))
    elif choice == "shape":
        one["shape"] = trial.draw.choice(([], [0], [2**63], [2**32, 2**32], [-1], [1.5], [1] * 1000, "x"))
    elif choice == "rule":
        description["rule"] = trial.draw.choice(("sgd", "", "nothing", 7, None))
    elif choice == "devices":
        description["devices"] = trial.draw.choice(([], ["x"] * 1000, [None], "x"))
    elif choice == "group":
        one["group"] = trial.draw.choice((-1, 2**31, 2**64 - 1, "x", None))
    elif choice == "empty":
        description["space"]["ranges"] = []
    elif choice == "twice":
        ranges.append(ranges[0])
    elif choice == "type":
        description = trial.draw.choice(([], "x", 7, None, {}, {"space": 1}, {"space": {"ranges": [1]}}))
    elif trial.draw.random() < 0.3:
        return bytes(trial.draw.randbytes(200))
    else:
        deep = trial.draw.choice((b"[", b'{"a":')) * trial.draw.choice((100, 10_000, 200_000))
        return trial.draw.choice((deep, text[:-1] + b',"more":' + deep, text[:-1] + b',"more":' + b"[" * 100_000 +
                                  b"]" * 100_000 + b"}"))
    return json.dumps(description).encode()


@scenario(count=180, short=2)
def hostile(trial):
    """Metadata that nobody wrote by accident: odd numbers and texts, the checksums right."""
    kind = KINDS[trial.draw.choice(("f32", "two"))]
    run = trial.machine.begun(kind, trial.folder)
    store = StoreFile(state_of(run))
    what, sparse = trial.index % 3, False
    if what == 0 and trial.draw.random() < 0.2:
        store.put("layout_bytes", trial.draw.choice((2**30, 2**36, 2**40)))
        store.put("container_bytes", 2**41)
        store.seal_superblocks()
        sparse = True
    elif what == 0:
        for _ in range(trial.draw.randint(1, 2)):
            field = trial.draw.choice(sorted(FIELDS))
            bits = 32 if FIELDS[field][1] == "I" else 64
            store.put(field, trial.draw.choice(_ODD_NUMBERS) % 2**bits)
            if field == "copy":
                break
        store.seal_superblocks()
    elif what == 1:
        field = trial.draw.choice(sorted(LAYOUT_FIELDS))
        bits = 32 if LAYOUT_FIELDS[field][1] == "I" else 64
        store.put_layout(field, trial.draw.choice(_ODD_NUMBERS) % 2**bits)
        store.seal()
    else:
        store.put_description(_odd_description(trial, store.description))
        store.seal()
    store.save()
    if sparse:
        os.truncate(store.path, 2**41)
    devices = trial.machine.devices(kind, run)
    words = [("inspect", devices[0], "--ranges"), ("fsck", *devices),
             ("reshard", "--from", *devices, "--to", trial.folder / "to"),
             ("export", run, "--out", trial.folder / "weights"), trial.machine.train_words(kind, run)]
    codes = []
    for each in words:
        done = trial.machine.answer(*each, memory=8 << 30)
        if any(ord(c) < 32 and c not in "\n\t\r" or 0x7f <= ord(c) < 0xa0 for c in done.text):
            raise Failure(f"control characters in what {each[0]} prints")
        codes.append(done.code)
    return Outcome.REFUSED if codes[-1] else Outcome.UNHARMED


