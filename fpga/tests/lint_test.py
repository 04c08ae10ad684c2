"""The kernels have nothing that v++ refuses, and lint.py finds what it says it finds.

Usage: lint_test.py PROJECT_ROOT
"""
import contextlib
import io
import pathlib
import shutil
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "fpga/lint"))
import lint  # noqa: E402  (its folder is known only now)

BAD = """
#include "fpga/kernels/dataflow.h"
#include <cstdlib>
#include <vector>
namespace smartinf {
inline int deeper(int n) { return n > 0 ? deeper(n - 1) : 0; }
struct Base { virtual int value() { return 1; } };
inline float twice(float x) { return x + x; }
}
extern "C" void smartinf_bad(const int* in, int* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = in[i];
  static int calls = 0;
  int* more = new int[2];
  more[0] = ++calls;
  out[0] = more[0] + smartinf::deeper(n) + std::abs(n) + static_cast<int>(smartinf::twice(2));
  std::vector<int> many(3);
  auto add = [&] { out[1] = 1; };
  add();
}
"""


def run(root):
    text = io.StringIO()
    arguments, sys.argv = sys.argv, ["lint.py", str(root)]
    with contextlib.redirect_stdout(text):
        code = lint.main()
    sys.argv = arguments
    return code, text.getvalue()


class LintTest(unittest.TestCase):
    def test_kernels(self):
        code, text = run(ROOT)
        self.assertEqual(code, 0, text)

    def test_what_it_finds(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for part in ("fpga/kernels", "fpga/lint", "fpga/sim"):
                (root / part).mkdir(parents=True)
                for header in (ROOT / part).glob("*.h"):
                    shutil.copy(header, root / part)
            (root / "fpga/kernels/bad.cc").write_text(BAD, encoding="utf-8")
            code, text = run(root)
        self.assertEqual(code, 1)
        for what in ("deeper calls itself", "a virtual function", "an operator of floating-point numbers",
                     "a loop of unknown length", "calls outlives its call", "memory from the heap", "a lambda",
                     "calls abs", "its object needs operator new"):
            self.assertIn(what, text)


if __name__ == "__main__":
    if not (shutil.which("clang++") or shutil.which("clang++-14")):
        print("no clang++: the kernels were not looked at")
        sys.exit(77)
    unittest.main()
