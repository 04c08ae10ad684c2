"""`python -m smartinf COMMAND`: import-ds-config here, everything else the smartinf command."""

import os
import shutil
import sys

from smartinf.errors import Error


def _binary():
    """The command that came with the wheel, else one on PATH that is not this script."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "smartinf")
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("smartinf")
    if found is not None:
        with open(found, "rb") as file:
            if file.read(4) == b"\x7fELF":
                return found
    return None


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["import-ds-config"]:
        if len(arguments) != 2 or arguments[1].startswith("-"):
            print(
                "Usage: python -m smartinf import-ds-config ds_config.json\n\n"
                "Prints the call and the recipe that do what a DeepSpeed configuration says, and lists "
                "what has no equivalent.",
                file=sys.stdout if "--help" in arguments else sys.stderr,
            )
            return 0 if "--help" in arguments else 2
        from smartinf import deepspeed

        try:
            print(deepspeed.report(arguments[1]))
        except Error as error:
            print(f"smartinf: {error}", file=sys.stderr)
            return 1
        return 0
    binary = _binary()
    if binary is None:
        print(
            "smartinf: the command is not installed with this package; build it with scripts/setup.sh "
            "and put build/release/bin on PATH",
            file=sys.stderr,
        )
        return 1
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    sys.exit(main())
