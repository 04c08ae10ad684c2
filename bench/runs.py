"""The smartinf command, run by the programs of this folder. SMARTINF names it [build/release/bin/smartinf]."""
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMARTINF = os.environ.get("SMARTINF", str(ROOT / "build/release/bin/smartinf"))


def _end(kind, error, trace):
    """Ctrl-C and a file that cannot be read or written need no traceback; anything else is a fault of the program."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif issubclass(kind, OSError) and error.filename is not None:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _end


def text_of(*words):
    """What the command prints; ends the program with the command's own words where it fails."""
    try:
        done = subprocess.run([SMARTINF, *map(str, words)], capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit(f"{SMARTINF} is not there: build it, or name it in the environment variable SMARTINF")
    if done.returncode != 0:
        sys.exit(f"smartinf {' '.join(map(str, words))}: {done.stderr}")
    return done.stdout


def rows_of(*words):
    """The JSON objects that the command prints, a line each."""
    return [json.loads(line) for line in text_of(*words).splitlines() if line.startswith("{")]


def values_in(text):
    """Of a machine file's text the values by "section.key"; of the devices those of the first."""
    tables = {name: table[0] if isinstance(table, list) else table for name, table in tomllib.loads(text).items()}
    return {f"{name}.{key}": value for name, table in tables.items() if isinstance(table, dict)
            for key, value in table.items()}


def with_values(text, values):
    """A complete machine file's text (--print-machine) in which keys, named "section.key", have other values: what is
    given, or a function of the old one's text."""
    lines, section, left = [], "", set(values)
    for line in text.splitlines():
        if header := re.match(r"\s*\[+(\w+)\]+", line):
            section = header.group(1)
        key = re.match(r"(\w+) = ([^#]*[^#\s])", line)
        name = f"{section}.{key.group(1)}" if key else None
        if name in values:
            left.discard(name)
            value = values[name]
            line = f"{key.group(1)} = {value(key.group(2)) if callable(value) else value}"
        lines.append(line)
    assert not left, f"not in the machine file: {left}"
    return "\n".join(lines) + "\n"


def this_machine():
    """The machine in words, for a page of results."""
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8")
                  if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB memory, Linux {platform.release().split('-')[0]}"


def pyplot():
    """matplotlib's, for files; ends the program where there is none."""
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"pictures need matplotlib: {sys.executable} -m pip install matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "smartinf"  # the same rows give the same file
    import matplotlib.pyplot

    return matplotlib.pyplot
