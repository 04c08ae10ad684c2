#!/usr/bin/env python3
"""Writes rows of a run's log into an event file of TensorBoard. Used by `smartinf metrics`.

Usage: write_tensorboard.py DIR < ROWS

ROWS is a JSON object on each line: a step, and numbers by name; an empty line asks that what came before it
be in the file. The file in DIR always has the same name, so that a second run replaces it.
"""
import json
import os
import signal
import sys
import tempfile

NAME = "events.out.tfevents.smartinf"


def tag_of(name):
    """TensorBoard puts what has the same word before the first stroke into one section."""
    parts = name.split("/")
    if parts[0] == "layers":
        return f"{parts[-1]} by layer/" + "/".join(parts[1:-1])
    if parts[0] == "evaluation_loss":
        return "validation/" + "/".join(parts[1:])
    if name == "validation_loss":
        return "validation/loss"
    return "train/" + name


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input is the end
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        sys.exit(f"smartinf: {sys.executable} has no tensorboard ({error}). Install it ({sys.executable} -m pip "
                 "install tensorboard), or name another Python in the environment variable SMARTINF_PYTHON")
    folder = sys.argv[1]
    path = os.path.join(folder, NAME)
    made = None
    try:
        os.makedirs(folder, exist_ok=True)
        # TensorBoard does not look at this name.
        file, made = tempfile.mkstemp(prefix=".smartinf-", dir=folder)
        os.fchmod(file, 0o666 & ~umask())
        with os.fdopen(file, "wb") as out:
            writer = RecordWriter(out)
            writer.write(Event(wall_time=0.0, file_version="brain.Event:2").SerializeToString())
            clock = 0.0
            for line in sys.stdin:
                if line.strip():
                    row = json.loads(line)
                    clock = row.get("began_s", clock)
                    values = [Summary.Value(tag=tag_of(name), simple_value=value) for name, value in row.items()
                              if name not in ("step", "began_s") and type(value) in (int, float)]
                    event = Event(wall_time=clock, step=row["step"], summary=Summary(value=values))
                    writer.write(event.SerializeToString())
                    continue
                writer.flush()
                if made:
                    os.replace(made, path)
                    made = None
                    print(path, flush=True)
    except OSError as error:
        sys.exit(f"smartinf: cannot write TensorBoard's events: {error}")
    finally:
        if made:
            os.unlink(made)


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    main()
