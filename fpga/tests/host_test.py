"""The host program for a card, over the kernels in software: every rule and gradient, and what goes wrong.

Usage: host_test.py UPDATE_ON_CARD
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)


class Host(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def run_host(self, name, *arguments, **environment):
        path = pathlib.Path(self.folder.name) / name
        path.write_text("xclbin")
        return subprocess.run([PROGRAM, path, *arguments], capture_output=True, text=True, env=os.environ | environment)

    def test_every_kernel_has_the_bits_of_the_truth(self):
        for rule in ("adam", "sgd", "adagrad"):
            for gradient in ("dense", "pairs", "message"):
                for elements in ("1", "1013", "70001"):
                    with self.subTest(rule=rule, gradient=gradient, elements=elements):
                        done = self.run_host(f"smartinf_{rule}_{gradient}.hw.xclbin", elements)
                        self.assertEqual(done.returncode, 0, done.stderr)
                        self.assertIn(f"{elements} elements, the same bits", done.stdout)

    def test_other_bits_are_named(self):
        done = self.run_host("smartinf_adam_dense.hw.xclbin", "1013", SMARTINF_SOFTWARE_CARD="flip")
        self.assertEqual(done.returncode, 1)
        self.assertIn("plane 0, 32-bit number 0", done.stderr)

    def test_a_file_is_chosen_by_its_name(self):
        done = self.run_host("smartinf_lion_dense.hw.xclbin")
        self.assertEqual(done.returncode, 1)
        self.assertIn("names no rule", done.stderr)
        done = self.run_host("smartinf_adam_dense.hw.xclbin", "10", "another card")
        self.assertEqual(done.returncode, 1)
        self.assertIn('no card "another card"', done.stderr)


if __name__ == "__main__":
    unittest.main()
