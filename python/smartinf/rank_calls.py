"""The collective calls of the core among ranks (engine/ranks/collectives.h) and those for new weights, over
torch.distributed, in CPU memory. Each message goes from rank to rank, so that what is missing has a name: a rank that has
died, or one that does not come. A frame of one size says in front of each which call it belongs to: ranks that are at
different calls say so, where gloo would end the process because of a message of another size."""

import ctypes
import logging
import os
import queue
import re
import socket
import struct
import threading
import time

import torch
import torch.distributed as dist

from smartinf.errors import DeviceError

_log = logging.getLogger("smartinf")
CONTROL, COMMIT = 0, 1  # channels; commits are agreed on by a thread of the core's
_RESUME = "The last committed step stands: start all ranks again with resume=True to go on from it"
_FIRST_SECONDS = 2.0  # for a third rank to say what has failed first
_STORE_SECONDS = 5.0  # a call to a store whose machine is gone never returns
_FRAME = struct.Struct("<QQ24s64s408s")  # number of the exchange, bytes, what is exchanged, the call, short messages
_SHORT = 408
_STEP = "a step"


class RankCalls:
    """The one record of who failed first. A failure of any call, also of torch's own sums, is what all later ones raise
    as well. The first failure that any rank finds is put into the store of the process group, and is what all ranks say:
    whoever gives up breaks the calls of others."""

    def __init__(self, members, rank, make_group, timeout):
        """members: ranks of the job. make_group(): another gloo group of them, collective. timeout: seconds."""
        self._rank, self._world, self._timeout = rank, len(members), timeout
        self._others = [r for r in range(len(members)) if r != rank]
        self._groups = [make_group(), make_group()]
        self._exchanges = [0, 0]  # so far, by channel
        self.call = _STEP  # what the script has called, for messages
        self._store = _store_of(self._groups[0])
        self._lock = threading.Lock()  # the script's thread and the core's commits may miss a rank at once
        self._failure = None  # of the first call that failed: its code and text
        self._unfinished = []  # messages that it leaves: other ranks may still be waiting for them
        self._names = [f"rank {r}" for r in members]
        me = f"rank {members[rank]} (process {os.getpid()} on {socket.gethostname()})".encode()
        self._names = [name.rstrip(b"\0").decode() for name in self.all_gather(CONTROL, me[:256].ljust(256, b"\0"))]

    # ---- For the core.

    def all_gather(self, channel, mine):
        """Every rank's bytes, as many of each, by rank."""
        frames = self._frames(channel, "gather", len(mine), mine)
        if len(mine) > _SHORT:
            parts = {r: _room(len(mine)) for r in self._others}
            self._exchange(self._groups[channel], dict.fromkeys(self._others, _tensor(mine)), parts)
            frames = {r: bytes(part.tolist()) for r, part in parts.items()}
        return [mine if r == self._rank else frames[r][: len(mine)] for r in range(self._world)]

    def all_to_all(self, channel, send, sizes):
        """send[r]: bytes to rank r; sizes[r]: of what comes from it, on which both agree. Returns that, by rank."""
        self._frames(channel, "exchange", 0, b"")
        sent = {r: _tensor(send[r]) for r in self._others if send[r]}
        parts = {r: _room(sizes[r]) for r in self._others if sizes[r]}
        self._exchange(self._groups[channel], sent, parts)
        come = {r: ctypes.string_at(part.data_ptr(), part.nbytes) for r, part in parts.items()}
        return [send[r] if r == self._rank else come.get(r, b"") for r in range(self._world)]

    def all_texts(self, mine):
        """Every rank's bytes, of any sizes, by rank."""
        sizes = [int.from_bytes(size, "little") for size in self.all_gather(CONTROL, len(mine).to_bytes(8, "little"))]
        texts = self.all_gather(CONTROL, mine.ljust(max(sizes), b"\0"))
        return [text[:size] for text, size in zip(texts, sizes, strict=True)]

    def failed(self, text):
        """This rank gives up."""
        self._say_first(f"{self._names[self._rank]}: {text}", 0)

    # ---- For weights. Tensors are contiguous and in CPU memory, and have as many bytes on all ranks. After a failure
    # those that were to be filled in may hold anything, and may still be written to.

    def all_gather_tensors(self, group, parts):
        """parts[r] is rank r's tensor, for each rank: this rank's is sent to all others, theirs are filled in."""
        self.meet("weights", sum(part.nbytes for part in parts))
        theirs = {r: parts[r] for r in self._others}
        self._exchange(group, dict.fromkeys(self._others, parts[self._rank]), theirs)

    def broadcast_tensor(self, group, tensor, root):
        """Root's values into every rank's tensor."""
        self.meet("a tensor", tensor.nbytes)
        if self._rank == root:
            self._exchange(group, dict.fromkeys(self._others, tensor), {})
        else:
            self._exchange(group, {}, {root: tensor})

    def meet(self, what, size):
        """All ranks are about to exchange `size` bytes of `what`. Errors: one of them is about something else."""
        self._frames(CONTROL, what, size, b"")

    def of_torch(self, call):
        """What call(), one of torch's own among the ranks, returns. Its failure has no rank's name."""
        if self._failure is not None:
            raise self._error()
        try:
            return call()
        except RuntimeError as error:
            found = f"{self._names[self._rank]}: a sum over the ranks failed ({_first_line(error)})"
            raise self._fail(found, patience=_FIRST_SECONDS) from None

    # ---- Between ranks.

    def _frames(self, channel, what, size, short):
        """{other rank: its message, if it is short}. Errors: one of them is at another call."""
        call = "the commit of a step" if channel == COMMIT else self.call
        fields = self._exchanges[channel], size, what.encode(), call.encode(), short if len(short) <= _SHORT else b""
        self._exchanges[channel] += 1
        mine = _FRAME.pack(*fields)
        parts = {r: _room(_FRAME.size) for r in self._others}
        self._exchange(self._groups[channel], dict.fromkeys(self._others, _tensor(mine)), parts)
        messages = {}
        for r, part in parts.items():
            *theirs, messages[r] = _FRAME.unpack(bytes(part.tolist()))
            if tuple(theirs) != _FRAME.unpack(mine)[:-1]:
                self._at_another_call(r, call, theirs[3].rstrip(b"\0").decode())
        return messages

    def _at_another_call(self, r, mine, theirs):
        here, there = (f"{self._names[r]} is at {call}" for r, call in ((self._rank, mine), (r, theirs)))
        where = "at other parts of one call" if mine == theirs else "not at the same call"
        found = (
            f"the ranks are {where}: {', and '.join(sorted((here, there)))}. Make the same calls on each of them, with as many "
            "batches and steps in between"
        )
        raise self._fail(found)

    def _exchange(self, group, sent, parts):
        """sent: for each receiver the tensor that it is sent; parts: for each sender the tensor that its message comes
        into."""
        if self._failure is not None:
            raise self._error()
        sending, receiving, r, begin = [], [], None, time.monotonic()
        try:
            for r, tensor in sent.items():
                sending.append((r, group.send([tensor], r, 0)))
            for r, part in parts.items():
                receiving.append((r, group.recv([part], r, 0)))
            # Gloo does not hear of it when a rank dies that it sends to: what is received comes first.
            for r, work in receiving + sending:
                begin = time.monotonic()  # torch's limit is one of each wait
                work.wait()
        except BaseException as error:
            waited = time.monotonic() - begin
            self._unfinished += sending + receiving
            if not isinstance(error, Exception):
                # What others sent would be taken for messages of the next call.
                text = f"{self._names[self._rank]}: a call to the other ranks was interrupted"
                self._failure = self._failure or ("I/O error", text)
                raise
            raise self._fail_of(r, error, waited) from None

    def _error(self):
        code, text = self._failure
        made = DeviceError(f"{text}. {_RESUME}.")
        made.code, made.advice = code, _RESUME
        return made

    def _fail(self, found, code="I/O error", patience=0.0):
        """The error of a call that has failed, and of all later ones: what any rank has said first, within `patience`
        seconds, else `found`."""
        with self._lock:
            if self._failure is None:
                self._failure = code, self._say_first(found, patience)
        # In the log too: the script may wait in a call of its own, which may say no name.
        _log.error("%s. %s.", self._failure[1], _RESUME)
        return self._error()

    def _fail_of(self, r, error, waited):
        """_fail() for an error of a message from or to rank r."""
        name = self._names[r]
        if not isinstance(error, RuntimeError):  # not of a message, but of the script's process group itself
            return self._fail(f"{self._names[self._rank]}: a call to {name}: {type(error).__name__}: {error}")
        if waited > 0.9 * self._timeout:
            return self._fail(f"{name} has not answered for {waited:.0f} s", code="timeout")
        found = f"{name} has ended, or cannot be reached any more ({_first_line(error)})"
        return self._fail(found, patience=_FIRST_SECONDS if self._world > 2 else 0.0)

    def _say_first(self, text, patience):
        """What any rank has said first; within `patience` seconds another may."""
        if self._store is None:
            return text
        answers = queue.SimpleQueue()

        def ask():
            try:
                key, until = "smartinf/failure", time.monotonic() + patience
                while time.monotonic() < until and not self._store.check([key]):
                    time.sleep(0.05)
                answers.put(self._store.compare_set(key, "", text).decode())
            except Exception:  # the store is gone, with the rank that served it
                answers.put(text)

        threading.Thread(target=ask, daemon=True).start()
        try:
            return answers.get(timeout=patience + _STORE_SECONDS)
        except queue.Empty:
            return text


def _first_line(error):
    """Of torch's text, without the line of its source and what it guesses."""
    return re.sub(r"^\[[^]]*\] *|\. This is typically.*", "", str(error).partition("\n")[0])[:300]


def _tensor(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _room(0)


def _room(size):
    return torch.empty(size, dtype=torch.uint8)


def timeout_of(process_group):
    """Of the group's own calls, a timedelta."""
    group = process_group or dist.group.WORLD
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return dist.distributed_c10d.default_pg_timeout  # this torch does not say


def _store_of(group):
    """None: torch does not say where it is."""
    try:
        return dist.distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError, TypeError):
        return None
