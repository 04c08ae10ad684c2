"""What ctest did not run although this machine could have. Usage: skipped.py JUNIT_FILE PYTHON [--no-torch]

Exit code 1 where an entry that was skipped, or was never made, tests something that this machine has;
what it has is looked up here, not by the tests themselves. Says nothing else: ctest's own summary, which
lists what was skipped, stays the last thing that is printed.
"""
import ctypes
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree


def succeeds(*command):
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def io_uring():
    ring = ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(120))  # io_uring_setup
    if ring >= 0:
        os.close(ring)
    return ring >= 0


def loop_devices():
    return os.geteuid() == 0 and succeeds("losetup", "-f")


def opencl():
    vendors = os.environ.get("OCL_ICD_VENDORS", "/etc/OpenCL/vendors")
    platforms = os.path.isdir(vendors) and any(name.endswith(".icd") for name in os.listdir(vendors))
    return platforms and succeeds("pkg-config", "--exists", "OpenCL")


def main():
    junit, python, *options = sys.argv[1:]
    torch = "--no-torch" not in options and succeeds(python, "-c", "import torch, pytest")
    has = {  # entry: what it needs, and whether that is here
        r"storage(\..*)?\.io_uring": ("io_uring", io_uring()),
        r"storage(\..*)?\.loop_devices": ("root and loop devices", loop_devices()),
        r"storage(\..*)?\.ext4": ("root, loop devices and mkfs.ext4",
                                  loop_devices() and shutil.which("mkfs.ext4") is not None),
        r"file_systems\.ext4": ("root, loop devices and mkfs.ext4",
                               loop_devices() and shutil.which("mkfs.ext4") is not None),
        r"file_systems\.tmpfs": ("root that may mount", loop_devices()),
        r"(csd|device_contract)\.opencl": ("OpenCL headers and a platform", opencl()),
        r"csd(\..*)?\.hwloc": ("libhwloc-dev", succeeds("pkg-config", "--exists", "hwloc")),
        r"fpga_lint": ("clang++", shutil.which("clang++") is not None),
        r"(serve|device_contract|engine)\.grpc": ("libgrpc++-dev and libssl-dev",
                                succeeds("pkg-config", "--exists", "grpc++", "openssl")),
        r"serve(\..*)?\.openssl": ("libssl-dev", succeeds("pkg-config", "--exists", "openssl >= 3")),
        r"certificates": ("the openssl command", shutil.which("openssl") is not None),
        r"python": ("torch and pytest", torch),
        r"train_bits": ("torch and pytest", torch),
    }
    skipped, ran = [], []
    for case in xml.etree.ElementTree.parse(junit).getroot().iter("testcase"):
        (skipped if case.get("status") == "notrun" else ran).append(case.get("name"))
    wrong = 0
    for entry, (needs, here) in has.items():
        missed = [name for name in skipped if re.fullmatch(entry, name)]
        if not missed and not any(re.fullmatch(entry, name) for name in ran):
            missed = [entry]
        if here and missed:
            wrong = 1
            print(f"{', '.join(missed)}: did not run, and this machine has {needs}", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
