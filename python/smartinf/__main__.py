"""`python -m smartinf COMMAND`: import-ds-config and torch-state here, all else the smartinf command."""

import os
import shutil
import sys

from smartinf.errors import Error


_OWN = (
    "python -m smartinf import-ds-config ds_config.json   the calls that do what a DeepSpeed "
    "configuration says"
)


def _binary():
    """The command that came with the wheel or that the build tree has built, else one on PATH that is not
    this script."""
    package = os.path.dirname(os.path.abspath(__file__))
    built = os.path.dirname(os.path.dirname(package))  # build/release of build/release/python/smartinf
    for found in (
        os.path.join(package, "bin", "smartinf"),
        os.path.join(built, "bin", "smartinf"),
        shutil.which("smartinf"),
    ):
        if found is not None and os.path.isfile(found) and os.access(found, os.X_OK):
            with open(found, "rb") as file:
                if file.read(4) == b"\x7fELF":
                    return found
    return None


def _import_ds_config(arguments):
    if len(arguments) != 1:
        return None
    from smartinf import deepspeed

    return deepspeed.report(arguments[0])


def _torch_state(arguments):
    if len(arguments) != 3 or arguments[1] != "--out":
        return None
    from smartinf import torch_state

    return torch_state.write(arguments[0], arguments[2])


# What is done here: a function of the words behind, which returns text to print, or None when the words
# are wrong; and how it is used.
_COMMANDS = {
    "import-ds-config": (
        _import_ds_config,
        "Usage: python -m smartinf import-ds-config ds_config.json|default_config.yaml\n\n"
        "Prints the calls and the recipe that do what a DeepSpeed configuration says, or accelerate's with one in it, "
        "and what each setting has become.",
    ),
    "torch-state": (
        _torch_state,
        "Usage: python -m smartinf torch-state CHECKPOINT --out optimizer.pt\n\n"
        "Writes the state of a checkpoint (of save_checkpoint(), or Trainer's checkpoint-N) as the "
        "state dict of torch.optim's class, which load_state_dict() and Trainer take. Needs no model and no "
        "devices, and as much memory as torch's optimizer. The way back needs no tool: load_state_dict() "
        "of a smartinf optimizer takes torch's state dict.",
    ),
}


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _COMMANDS:
        run, usage = _COMMANDS[arguments[0]]
        asked = "--help" in arguments
        try:
            text = None if asked else run(arguments[1:])
        except Error as error:
            print(f"smartinf: {error}", file=sys.stderr)
            return 1
        if text is None:
            print(usage, file=sys.stdout if asked else sys.stderr)
            return 0 if asked else 2
        print(text)
        return 0
    binary = _binary()
    asked = not arguments or arguments[0] in ("--help", "-h")
    if asked:
        print(f"{_OWN}\npython -m smartinf COMMAND ...   everything else: the smartinf command\n", flush=True)
    if binary is None:
        print(
            "smartinf: the command smartinf is neither in this package nor on PATH. `pip install .` in the "
            "checkout installs both; in a build tree `cmake --build build/release --target smartinf` "
            "builds it.",
            file=sys.stderr,
        )
        return 0 if asked else 1
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    sys.exit(main())
