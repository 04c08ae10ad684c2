"""`python -m smartinf COMMAND`: import-ds-config here, everything else the smartinf command."""

import os
import shutil
import sys

from smartinf.errors import Error


_OWN = (
    "python -m smartinf import-ds-config ds_config.json   the call that does what a DeepSpeed "
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
