"""The smartinf command as a user meets it: messages, exit codes, JSON.

Usage: command_line_test.py PATH/TO/smartinf PROJECT_ROOT
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop())
COMMAND = sys.argv.pop()


def run(*words, cwd=None, **environment):
    return subprocess.run([COMMAND, *words], cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment}, check=False)


class WrongUsage(unittest.TestCase):
    def refused(self, *words, says, **environment):
        done = run(*words, **environment)
        self.assertEqual(done.returncode, 2, done)
        self.assertIn(says, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertLess(done.stderr.count("\n"), 3, "a wrong word gets a line, not a page")

    def test_unknown_command_names_the_nearest(self):
        self.refused("docter", says="did you mean doctor?")
        self.refused("zebra", says="smartinf --help")

    def test_unknown_flag_names_the_nearest(self):
        self.refused("doctor", "--jsno", says="did you mean --json?")
        self.refused("train", "--print-confg", says="did you mean --print-config?")

    def test_missing_and_superfluous_words(self):
        self.refused("inspect", says="device is required")
        self.refused("doctor", "extra", says="'extra'")
        self.refused("train", says="no recipe given")

    def test_recipe_keys(self):
        recipe = str(ROOT / "recipes/quickstart.toml")
        self.refused("train", recipe, "--train.stpes", "5", says="did you mean train.steps?")
        self.refused("train", recipe, "--train.steps", "many", says="expected a whole number")
        self.refused("train", recipe, "--train.steps", says="needs a value")
        self.refused("train", recipe, "--train.steps", "0", says="--train.steps is 0")
        self.refused("train", recipe, "--set", "train.steps", says="KEY=VALUE")
        self.refused("doctor", "--train.steps", "5", says="takes none")

    def test_recipe_files(self):
        self.refused("train", "no/such.toml", says="no/such.toml")
        with tempfile.TemporaryDirectory() as folder:
            recipe = pathlib.Path(folder) / "r.toml"
            recipe.write_text("[model]\nlayres = 3\n", encoding="utf-8")
            self.refused("train", str(recipe), says="r.toml:2:1: unknown key 'model.layres'; "
                                                    "did you mean model.layers?")

    def test_a_pinned_instruction_set_that_is_not_there(self):
        self.refused("inspect", ".", says="SMARTINF_FORCE_ISA", SMARTINF_FORCE_ISA="abacus")

    def test_nothing_at_all_shows_help(self):
        done = run()
        self.assertEqual(done.returncode, 2)
        self.assertIn("doctor", done.stderr)


class Help(unittest.TestCase):
    def test_every_command_has_help_with_examples(self):
        for command in ("train", "doctor", "inspect", "bench step", "bench kernels"):
            done = run(*command.split(), "--help")
            self.assertEqual(done.returncode, 0, done)
            self.assertIn("Examples:", done.stdout, command)

    def test_version(self):
        self.assertRegex(run("--version").stdout, r"^\d+\.\d+\.\d+\n$")


class Recipes(unittest.TestCase):
    def test_print_config_says_where_values_come_from(self):
        recipe = "recipes/quickstart.toml"
        done = run("train", recipe, "--print-config", "--train.steps", "70", cwd=ROOT)
        self.assertEqual(done.returncode, 0, done)
        self.assertRegex(done.stdout, r"steps = 70 +# flag")
        self.assertRegex(done.stdout, r"width = \d+ +# recipes/quickstart.toml:\d+")
        self.assertRegex(done.stdout, r"checksums = true +# default")

    def test_reference_page_is_in_step(self):
        done = run("train", "--help-recipe=markdown")
        self.assertEqual(done.stdout, (ROOT / "docs/recipe.md").read_text(encoding="utf-8"))


class Doctor(unittest.TestCase):
    def test_json_has_findings_and_devices(self):
        with tempfile.TemporaryDirectory() as folder:
            done = run("doctor", "--json", "--device", folder, "--device", folder + "/new")
            self.assertEqual(done.returncode, 0, done)
            report = json.loads(done.stdout)
            topics = [finding["topic"] for finding in report["findings"]]
            for topic in ("I/O engine", "memory", "locked memory", "cores", "instruction set", "torch"):
                self.assertIn(topic, topics)
            self.assertEqual(len(report["devices"]), 2)
            self.assertGreater(report["devices"][0]["free_bytes"], 0)
            self.assertEqual(os.listdir(folder), [], "the doctor leaves nothing behind")

    def test_a_file_is_no_device(self):
        done = run("doctor", "--device", __file__)
        self.assertIn("neither a directory nor a block device", done.stdout)


class Inspect(unittest.TestCase):
    def test_what_is_not_a_device(self):
        with tempfile.TemporaryDirectory() as folder:
            empty = run("inspect", folder)
            self.assertEqual(empty.returncode, 1)
            self.assertIn(folder, empty.stderr)
            self.assertEqual(run("inspect", folder + "/none").returncode, 1)
            (pathlib.Path(folder) / "smartinf.state").write_bytes(b"not a state" * 10000)
            foreign = run("inspect", folder)
            self.assertEqual(foreign.returncode, 1)
            self.assertIn("superblock", foreign.stderr)

    def test_what_a_run_left(self):
        with tempfile.TemporaryDirectory() as folder:
            made = run("bench", "step", "--params", "3e5", "--repeat", "1", "--keep", "--device", folder,
                       "--io-bytes", "1048576", "--io-depth", "2")
            self.assertEqual(made.returncode, 0, made)
            done = run("inspect", folder, "--json", "--ranges")
            self.assertEqual(done.returncode, 0, done)
            found = json.loads(done.stdout)
            self.assertTrue(found["initialized"])
            self.assertGreaterEqual(found["committed_step"], 1)
            self.assertEqual(found["elements"], found["run_elements"])
            self.assertEqual(sum(r["elements_here"] for r in found["ranges"]), found["elements"])
            self.assertEqual(found["planes"], ["master", "momentum", "variance"])


if __name__ == "__main__":
    unittest.main()
