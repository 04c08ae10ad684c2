"""Fails on an include that the module table in docs/architecture.md does not allow.

Usage: module_includes_test.py PROJECT_ROOT
"""
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ".").resolve()
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)
SOURCES = {".h", ".cc", ".inc"}

# A third-party header that stays in one place: pattern -> paths that may name it.
THIRD_PARTY = {
    r"liburing\.h": ["smartinf/storage/uring_ring"],
    r"CL/": ["smartinf/csd/opencl", "fpga/host/", "fpga/tests/software_opencl"],
    r"grpc": ["smartinf/serve/"],
    r"openssl/": ["smartinf/serve/"],
    r"hwy/": ["smartinf/kernels/"],
    r"(torch|ATen|c10)/": ["smartinf/train/", "python/", "tests/accelerator"],
    r"nanobind/": ["python/"],
    r"xxhash\.h": ["smartinf/base/checksum"],
    r"hwloc": ["smartinf/csd/"],
    r"CLI/": ["apps/", "workloads/"],
    r"spdlog/": ["apps/"],
    r"toml\+\+": ["smartinf/base/toml.h"],
}


def read_table(text):
    """The modules of the architecture page's table: {module: set of modules it may include}."""
    table = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not re.fullmatch(r"[a-z]+", cells[0]) or cells[0] == "module":
            continue
        table[cells[0]] = cells[2]
    return table


def violations(root, table):
    found = []
    files = [p for top in ("smartinf", "apps", "python", "tests", "bench", "fpga", "workloads")
             for p in sorted((root / top).rglob("*")) if p.suffix in SOURCES]
    for path in files:
        name = path.relative_to(root).as_posix()
        module = name.split("/")[1] if name.startswith("smartinf/") else None
        if module is not None and module not in table:
            found.append(f"{name}: the table in docs/architecture.md has no module '{module}'")
            continue
        for header in INCLUDE.findall(path.read_text(encoding="utf-8")):
            for pattern, homes in THIRD_PARTY.items():
                if re.match(pattern, header) and not any(name.startswith(h) for h in homes):
                    found.append(f"{name}: <{header}> belongs to {', '.join(homes)}")
            # Workloads use what the library gives everybody, and nothing uses them.
            if header.split("/")[0] in ("apps", "workloads", "python", "tests"):
                workload = "/".join(name.split("/")[:2])
                if name.startswith("workloads/") and not header.startswith(workload + "/"):
                    found.append(f"{name}: a workload may not include {header}")
                if header.startswith("workloads/") and not name.startswith("workloads/"):
                    found.append(f"{name}: may not include {header}, which is a workload's")
            if module is None or not header.startswith("smartinf/"):
                continue
            target = header.split("/")[1]
            allowed = table[module]
            if target == module or target in allowed.split():
                continue
            if allowed == "options of every module" and (header.endswith("options.h") or target == "base"):
                continue
            found.append(f"{name}: may not include {header} (module '{module}' may include: {allowed})")
    return found


class ModuleIncludes(unittest.TestCase):
    def setUp(self):
        self.table = read_table((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))

    def test_table_is_read(self):
        self.assertIn("storage", self.table)
        self.assertEqual(self.table["storage"].split(), ["base"])

    def test_no_include_outside_the_table(self):
        found = violations(ROOT, self.table)
        self.assertFalse(found, "\n" + "\n".join(found))

    def test_a_forbidden_include_is_found(self):
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            bad = pathlib.Path(folder) / "smartinf/storage/bad.cc"
            bad.parent.mkdir(parents=True)
            bad.write_text('#include "smartinf/engine/updater.h"\n#include <torch/torch.h>\n'
                           '#include "smartinf/base/status.h"\n')
            self.assertEqual(len(violations(pathlib.Path(folder), self.table)), 2)
            for name, header in (("workloads/graph_kernels/bad.cc", "apps/smartinf/commands.h"),
                                 ("apps/smartinf/bad.cc", "workloads/graph_kernels/accelerator.h")):
                path = pathlib.Path(folder, name)
                path.parent.mkdir(parents=True)
                path.write_text(f'#include "{header}"\n')
            self.assertEqual(len(violations(pathlib.Path(folder), self.table)), 4)


if __name__ == "__main__":
    unittest.main()
