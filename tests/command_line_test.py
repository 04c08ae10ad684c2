"""The smartinf command as a user meets it: messages, exit codes, JSON.

Usage: command_line_test.py PATH/TO/smartinf PROJECT_ROOT
"""
import fcntl
import json
import os
import pathlib
import shutil
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
        self.refused("bench", "step", "--densty", "0.1", says="did you mean --density?")
        self.refused("bench", "step", "--xyzzy", says="see smartinf bench step --help")
        self.refused("train", "--print-confg", says="did you mean --print-config?")

    def test_missing_and_superfluous_words(self):
        self.refused("inspect", says="device is required")
        self.refused("doctor", "extra", says="unexpected argument 'extra'")
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

    def test_questions_to_the_simulator(self):
        self.refused("simulate", "--devices", "0", says="at least 1")
        self.refused("simulate", "--model", "gpt2-4.0", says="gpt2-4.0B?")
        self.refused("simulate", "--method", "su+p", says="su+o?")
        self.refused("simulate", "--ratio", "1.5", says="at most 1")
        self.refused("simulate", "--ratio", "nan", says="not a number")
        self.refused("simulate", "--devices", "two", says="not a number")
        self.refused("simulate", "--devices", "1e5", says="at most 4096")
        self.refused("simulate", "--batch", "1e20", says="at most 1e15")
        self.refused("simulate", "--seq", "-3", says="at least 1")
        self.refused("simulate", "--layers", "2", says="--hidden")
        self.refused("simulate", "--layers", "2", "--hidden", "65", "--heads", "2", says="do not divide")
        self.refused("simulate", "--optimizer", "adm", says="adam?")
        self.refused("simulate", "--hide", "both", says="--overlap now")
        self.refused("simulate", "--overlap", "auto", says="none, late, early")
        self.refused("simulate", "--overlap", "early", says="slots are too few")
        self.refused("simulate", "--overlap", "early", "--slots", "8", "--method", "su+o+c", says="compressed")
        self.refused("simulate", "--gpu", "A5001", says="A5000?")
        self.refused("simulate", "--figure", "8", says="10, 11")
        self.refused("simulate", "--sweep", "device=1..3", says="devices?")
        self.refused("simulate", "--sweep", "devices=0..3", says="at least 1")
        self.refused("simulate", "--machine", "./none.toml", says="./none.toml")
        self.refused("simulate", "--model", "./none.json", says="./none.json")
        self.refused("calibrate", "--device", ".", "--gpu", "A5001", says="A5000?")
        self.refused("calibrate", "--device", ".", "--out", "./none/m.toml", says="--out")
        self.refused("plan", "llama3-8C", says="llama3-8B?")
        self.refused("plan", "llama3-8B", "--machine", "workstation-gen6", says="workstation-gen")
        self.refused("plan", "llama3-8B", "--hide", "forward", says="--overlap now")
        good = run("simulate", "--machine", "workstation-gen4", "--print-machine").stdout
        with tempfile.TemporaryDirectory() as folder:
            machine = pathlib.Path(folder) / "m.toml"
            for wrong, says in ((good.replace("link_bytes_per_s", "lnik_bytes_per_s", 1), "link_bytes_per_s?"),
                                (good.replace("read_bytes_per_s = ", "read_bytes_per_s = -", 1), "above zero"),
                                (good.replace("[host]", "[hots]"), "host?"),
                                (good.replace("[[device]]", "[device]"), "Write [[device]]"),
                                (good.replace("[gpu]", "[gpu"), "line 3"),
                                (good.replace("count = 4", "count = 0"), "above zero")):
                self.assertNotEqual(wrong, good)
                machine.write_text(wrong, encoding="utf-8")
                self.refused("plan", "llama3-8B", "--machine", str(machine), says=says)

    def test_a_machine_file_says_what_its_keys_are(self):
        text = run("simulate", "--machine", "workstation-gen4", "--print-machine").stdout
        for key in ("select_passes", "mixed_efficiency", "update_streams"):
            self.assertRegex(text, rf"(?m)^{key} = \S+ +# \w+")
        short, whole = (json.loads(run("simulate", "--gpu", gpu, "--json").stdout) for gpu in ("4090", "RTX4090"))
        self.assertEqual(short, whole)

    def test_calibrate_makes_no_directory_for_a_mistyped_one(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "drive-a").mkdir()
            wrong = pathlib.Path(folder) / "drvie-a"
            self.refused("calibrate", "--device", str(wrong), says=f"{folder}/drive-a?")
            self.refused("calibrate", "--device", f"{wrong}/", says=f"{folder}/drive-a?")
            self.assertFalse(wrong.exists())

    def test_nothing_at_all_shows_help(self):
        done = run()
        self.assertEqual(done.returncode, 2)
        self.assertIn("doctor", done.stderr)


class Help(unittest.TestCase):
    def test_every_command_has_help_with_examples(self):
        for command in ("train", "doctor", "inspect", "fsck", "checkpoint", "restore", "reshard", "gc", "bench step", "bench kernels"):
            done = run(*command.split(), "--help")
            self.assertEqual(done.returncode, 0, done)
            self.assertIn("Examples:", done.stdout, command)

    def test_types_are_named_plainly_and_examples_are_the_commands_own(self):
        shown = {words: run(*words.split(), "--help").stdout
                 for words in ("bench", "bench step", "bench scale", "bench traffic", "bench kernels", "plan",
                               "simulate", "calibrate", "export", "doctor", "reshard")}
        for command, text in shown.items():
            self.assertNotRegex(text, r"\b(FLOAT|UINT|INT|TEXT):|:\{| in \[\d", command)
            self.assertNotRegex(text, r"\d]? *=", command)
            self.assertIn(f"  smartinf {command.split()[0]}", text.split("Examples:")[-1], command)
            self.assertNotIn("smartinf train recipes/quickstart", text, command)
        self.assertRegex(shown["bench step"], r"--params NUMBER \[2e\+08\]")
        self.assertRegex(shown["bench step"], r"--state-format f32\|bf16\|q8 \[f32\]")
        self.assertIn("matrix-squares", shown["bench kernels"])

    def test_the_program_with_torch_is_named_when_it_is_missing(self):
        if not (pathlib.Path(COMMAND).parent / "smartinf-torch").exists():
            self.skipTest("this build has no torch")
        with tempfile.TemporaryDirectory() as folder:
            alone = shutil.copy(COMMAND, folder)
            done = subprocess.run([alone, "--verbose", "train", "recipe.toml"], capture_output=True, text=True,
                                  check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"cannot start {folder}/smartinf-torch: No such file or directory", done.stderr)
            self.assertEqual(subprocess.run([alone, "--version"], check=False, capture_output=True).returncode, 0)

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


TINY_LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 256, "tie_word_embeddings": True,
              "rope_theta": 50000.0, "rms_norm_eps": 1e-6}
MACHINE = ROOT / "machines/workstation-gen4.toml"


class Plan(unittest.TestCase):
    def planned(self, *words, code=0):
        done = run("plan", *words, "--json")
        self.assertEqual(done.returncode, code, done)
        return json.loads(done.stdout), done.stderr

    def test_memory_is_what_the_programs_hold(self):
        """Weights are not streamed: 16 bits of weight and of gradient for each parameter are on the GPU."""
        plan, _ = self.planned("llama3-8B", "--gpu", "4090", "--devices", "2", "--seq", "1024", "--batch", "1",
                               "--with", "train")
        self.assertFalse(plan["fits"])
        self.assertGreater(plan["gpu_bytes"], 4 * plan["parameters"])
        self.assertIn("It does not fit, with smartinf train: GPU memory lacks", plan["result"])
        self.assertIn("a GPU with memory of", plan["buy_next"][0]["what"])
        plan, _ = self.planned("llama3-8B", "--batch", "1")
        self.assertTrue(plan["fits"])
        self.assertEqual(plan["with"], "Python, release_gradients=True")
        self.assertEqual([one["fits"] for one in plan["uses"]], [False, False, True])
        self.assertIn("wears the drives out", plan["result"])
        self.assertEqual({option["overlap"] for option in plan["options"]}, {"none"})
        plan, _ = self.planned("llama3-8B", "--gpu", "H200", "--batch", "1")
        self.assertEqual({option["overlap"] for option in plan["options"]}, {"late"})
        seconds = [plan["overlap_total_s"][name] for name in ("none", "late", "early")]
        self.assertEqual(seconds, sorted(seconds, reverse=True))
        self.assertEqual(plan["total_s"], plan["overlap_total_s"]["late"])

    def test_accumulation(self):
        one, _ = self.planned("llama3-8B", "--gpu", "H200", "--batch", "1")
        many, _ = self.planned("llama3-8B", "--gpu", "H200", "--batch", "1", "--accumulation", "256")
        self.assertGreater(many["tokens_per_s"], 1.5 * one["tokens_per_s"])
        self.assertGreater(many["drive_life_days"], 1.5 * one["drive_life_days"])
        self.assertEqual(many["gpu_bytes"] - one["gpu_bytes"], 4 * one["parameters"])

    def test_no_gpu_is_said_as_it_is(self):
        with tempfile.TemporaryDirectory() as folder:
            text = MACHINE.read_text(encoding="utf-8").replace(
                'preset = "RTX4090"', 'name = "none"\npeak_flops = 1e12\nmemory_bytes_per_s = 5e10\n'
                "link_bytes_per_s = 1e10")
            machine = pathlib.Path(folder) / "none.toml"
            machine.write_text(text, encoding="utf-8")
            shown = run("plan", "llama3-8B", "--machine", str(machine), "--batch", "1").stdout
            self.assertIn("(no GPU, 4 x", shown)
            self.assertNotIn("GPU", shown.replace("no GPU", ""))

    def test_recipes_run_or_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            recipe = pathlib.Path(folder) / "r.toml"
            for model, feature in (("qwen3-0.6B", "norms of query and key"),
                                   ("qwen2.5-0.5B", "biases of query, key and value"),
                                   ("llama3-1B", "scaled rotary positions"),
                                   ("llama3-8B", "would not fit")):
                done = run("plan", model, "--recipe", str(recipe))
                self.assertEqual(done.returncode, 1, done)
                self.assertIn(feature, done.stderr)
                self.assertIn("drives last", done.stdout, "the plan itself is shown")
                self.assertFalse(recipe.exists())
            config = pathlib.Path(folder) / "config.json"
            config.write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
            machine = ["--machine", str(MACHINE), "--devices", "1", "--seq", "32", "--batch", "2"]
            for words in (["--method", "baseline"], ["--method", "su"], ["--method", "su+o"],
                          ["--method", "su+o", "--state-format", "q8", "--accumulation", "2"],
                          ["--method", "su+o+c", "--recompute", "false"], ["--precision", "f32"]):
                done = run("plan", str(config), *machine, *words, "--recipe", str(recipe))
                self.assertEqual(done.returncode, 0, done)
                self.assertNotIn("overlap", recipe.read_text(encoding="utf-8"))
                shown = run("train", str(recipe), "--print-config").stdout
                self.assertRegex(shown, r"rope_base = 50000(\.0)? ")
                self.assertRegex(shown, r"norm_eps = 1e-0?6 ")
                if run("train", str(recipe), "--data.paths", "none").stderr.find("built without torch") >= 0:
                    continue  # this build has no trainer
                trained = run("train", str(recipe), "--train.steps", "1", "--train.sample_tokens", "0",
                              "--data.paths", str(ROOT / "docs"), "--data.suffixes", ".md",
                              "--train.accelerator", "cpu", "--train.run", f"{folder}/run{len(words)}{words[-1]}",
                              "--device.0.path", f"{folder}/d{len(words)}{words[-1]}",
                              "--engine.io_size", "1MiB", "--engine.io_depth", "4")
                self.assertEqual(trained.returncode, 0, trained)
                self.assertIn("step 1/1  loss ", trained.stdout)

    def test_the_page_has_a_result_and_marks(self):
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder) / "plan.html"
            run("plan", "llama3-8B", "--batch", "1", "--html", str(page))
            text = page.read_text(encoding="utf-8")
            self.assertIn('<div class="result no"><p><b>It fits, with Python, release_gradients=True.', text)
            self.assertEqual(text.count('<div class="option best">'), 1)
            self.assertIn("<dt>exact</dt><dd>the same bits", text)
            self.assertNotIn("{{", text)
            self.assertIn("US dollars", text)
            self.assertRegex(text, r'<td class="no">\d+ days</td>')


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

    def test_names_that_people_know(self):
        shown = run("doctor").stdout
        if "AVX3" in shown:
            self.assertIn("AVX3 (AVX-512)", shown)
        self.assertNotRegex(shown, r"ok +wear +not known")

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


def make_state(folder, params="3e5"):
    """A small state of a few committed steps in each of the folders."""
    words = ["bench", "step", "--params", params, "--repeat", "1", "--keep", "--io-bytes", "1048576",
             "--io-depth", "2"]
    for one in [folder] if isinstance(folder, str) else folder:
        words += ["--device", one]
    made = run(*words)
    assert made.returncode == 0, made


class Bench(unittest.TestCase):
    def row(self, *words):
        done = run("bench", *words, "--json")
        self.assertEqual(done.returncode, 0, done)
        return json.loads(done.stdout)

    def test_traffic_is_the_papers_table(self):
        row = self.row("traffic", "--params", str(1 << 20))
        self.assertEqual((row["host_update_m"], row["smartupdate_f32_m"], row["smartupdate_bf16_m"]), (16, 4, 2))

    def test_scale_is_bounded_by_the_links_and_traced(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder) / "trace.json"
            result = self.row("scale", "--devices", "1,2", "--params", str(1 << 20), "--internal-read", "400MB",
                              "--internal-write", "300MB", "--host-link", "500MB", "--slow-device", "0.5",
                              "--trace", str(trace))
            self.assertEqual([row["devices"] for row in result["rows"]], [1, 2])
            for row in result["rows"]:
                for scheme in ("host_update", "naive", "overlapped"):
                    self.assertGreater(row[f"{scheme}_ratio"], 0.9, row)
            # One at half speed beside a whole one: three times one at half speed alone.
            slow, both = (row["overlapped_bound_s"] for row in result["rows"])
            link_s = 2 * (1 << 20) / 500e6
            self.assertAlmostEqual((slow - link_s) / (both - link_s), 3, delta=0.3)
            groups = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"]
                      if e["name"] == "process_name"}
            self.assertEqual(groups, {"device 0", "device 1", "device 0 internal link", "device 1 internal link",
                                      "host link"})

    def test_scale_stands_beside_the_simulator(self):
        """How close they are, docs/results/simulator.md says: a busy machine's times prove nothing."""
        result = self.row("scale", "--devices", "1,2", "--params", str(1 << 20), "--internal-read", "40MB",
                          "--internal-write", "30MB", "--host-link", "60MB", "--shared", "none", "--subgroups", "8")
        for row in result["rows"]:
            for scheme in ("host_update", "naive", "overlapped", "compressed"):
                self.assertGreater(row[f"{scheme}_simulated_s"], 0, row)
            # One after another or both ways at once: the schedules differ on the virtual clock, too.
            self.assertGreater(row["naive_simulated_s"], 1.3 * row["overlapped_simulated_s"], row)

    def test_unequal_devices_are_not_simulated(self):
        result = self.row("scale", "--devices", "2", "--params", str(1 << 18), "--slow-device", "0.5",
                          "--internal-read", "400MB", "--internal-write", "300MB")
        self.assertNotIn("overlapped_simulated_s", result["rows"][0])

    def test_step_on_its_own_compressed_state_and_on_another_format(self):
        with tempfile.TemporaryDirectory() as folder:
            words = ["bench", "step", "--params", "3e5", "--device", folder, "--io-bytes", "1048576", "--io-depth", "2"]
            done = run(*words, "--density", "0.08", "--repeat", "2", "--keep")
            self.assertEqual(done.returncode, 0, done)
            other = run(*words, "--density", "0.08", "--repeat", "1", "--state-format", "q8")
            self.assertEqual(other.returncode, 1)
            self.assertIn("smartinf reshard --state-format q8", other.stderr)

    def test_step_stands_beside_the_simulator(self):
        with tempfile.TemporaryDirectory() as folder:
            row = self.row("step", "--params", "4e6", "--device", folder, "--repeat", "1", "--threads", "1")
            self.assertGreater(row["simulated_s"], 0)
            self.assertEqual(row["subgroup_elements"] % 65536, 0)
            self.assertGreaterEqual(row["slots"], 2)
            # The processor's rate is the machine file's, where one is given: a slow one binds.
            slow = self.row("step", "--params", "4e6", "--device", folder, "--repeat", "1", "--machine",
                            "smartssd-a5000", "--state-format", "f32")
            self.assertAlmostEqual(slow["update_params_per_s"], 8.2e9 / 14, delta=1e6)

    def test_a_simulated_step_is_traced(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder) / "trace.json"
            done = run("simulate", "--model", "gpt2-4.0B", "--method", "su+o", "--trace", str(trace))
            self.assertEqual(done.returncode, 0, done)
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
            self.assertGreater(sum(e["ph"] == "X" and e["dur"] > 0 for e in events), 100)


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


class Fsck(unittest.TestCase):
    def check(self, *words):
        done = run("fsck", "--json", *words)
        return done.returncode, json.loads(done.stdout)

    def test_a_sound_run(self):
        with tempfile.TemporaryDirectory() as folder:
            make_state([folder + "/a", folder + "/b"])
            code, found = self.check(folder + "/a", folder + "/b")
            self.assertEqual((code, found["sound"], found["problem"], found["note"]), (0, True, "", ""))
            self.assertGreaterEqual(found["step"], 1)
            for device in found["devices"]:
                self.assertGreater(device["blocks_checked"], 0)
                self.assertEqual(device["faults"], [])
            code, found = self.check(folder + "/b")
            self.assertEqual(code, 0)
            self.assertIn("device 0 of the 2", found["note"])
            self.assertIn("sound", run("fsck", folder + "/a", folder + "/b").stdout)

    def test_every_kind_of_block_is_found_and_copies_are_repaired(self):
        with tempfile.TemporaryDirectory() as folder:
            make_state(folder)
            file = folder + "/smartinf.state"
            metadata_end = 4 * 65536 + 2 * 4096
            step = json.loads(run("inspect", folder, "--json").stdout)["committed_step"]
            copies = [(65536 * copy + 100, "superblock") for copy in range(4)]
            copies += [(4 * 65536 + 4096 * copy + 80, "layout") for copy in range(2)]
            # Two copies of the table of even steps, then two of odd ones: header, records, 64 KiB.
            size = pathlib.Path(file).stat().st_size
            stride = next(n for n in range(65536, 1 << 20, 4096) if table_at(file, metadata_end, n, step))
            copies += [(metadata_end + (step % 2 * 2 + copy) * stride + 60, "table") for copy in range(2)]
            for offset, kind in copies:
                with self.subTest(kind=kind, offset=offset):
                    flip(file, offset)
                    code, found = self.check(folder)
                    self.assertEqual(code, 1)
                    self.assertEqual([f["kind"] for f in found["devices"][0]["faults"]], [kind])
                    self.assertFalse(found["devices"][0]["state_lost"])
                    code, found = self.check(folder, "--repair")
                    self.assertEqual((code, found["devices"][0]["faults_repaired"]), (0, 1))
                    self.assertEqual(self.check(folder)[0], 0)
            # State: one of the two slots of a plane is current, so of two flips one is found.
            first = metadata_end + 4 * stride
            blocks = 0
            for offset in range(first + 5, size, 262144):
                flip(file, offset)
                code, found = self.check(folder, "--repair")
                if code == 1:
                    blocks += 1
                    self.assertTrue(found["devices"][0]["state_lost"])
                    self.assertEqual([f["kind"] for f in found["devices"][0]["faults"]], ["block"])
                flip(file, offset)
            self.assertEqual(self.check(folder)[0], 0)
            self.assertGreaterEqual(blocks, 12, "of five current blocks of each of three planes")

    def test_what_cannot_be_checked(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(run("fsck", folder).returncode, 1)
            make_state([folder + "/a", folder + "/b"])
            shutil.copytree(folder + "/a", folder + "/copy")
            code, found = self.check(folder + "/a", folder + "/copy")
            self.assertEqual(code, 1)
            self.assertIn("two devices say", found["problem"])
            os.truncate(folder + "/a/smartinf.state", 300000)
            code, found = self.check(folder + "/a", folder + "/b")
            self.assertEqual(code, 1)
            self.assertTrue(found["devices"][0]["state_lost"])
            self.assertTrue(not found["devices"][1]["state_lost"])
            told = run("fsck", folder + "/a", folder + "/b").stdout
            self.assertIn("state is lost", told)
            self.assertNotIn("resumes after", told)

    def test_values_that_make_no_sense(self):
        for words in (("fsck", "x", "--memory-budget", "0"), ("checkpoint", "x", "--out", "y", "--keep=-1"),
                      ("checkpoint", "x", "--out", "y", "--memory-budget", "1000"),
                      ("reshard", "--from", "x", "--to", "y", "--memory-budget", "0")):
            with self.subTest(words=words):
                done = run(*words)
                self.assertEqual(done.returncode, 2, done)
                self.assertIn(words[-1].split("=")[0] if "=" in words[-1] else words[-2], done.stderr)


class Copies(unittest.TestCase):
    def state_of(self, folder):
        return json.loads(run("inspect", folder, "--json").stdout)

    def done(self, *words):
        done = run(*words, "--json")
        self.assertEqual(done.returncode, 0, done)
        return json.loads(done.stdout)

    def test_checkpoint_restore_and_reshard(self):
        with tempfile.TemporaryDirectory() as folder:
            a, b, c, d = (folder + "/" + name for name in "abcd")
            make_state([a, b])
            step = self.state_of(a)["committed_step"]
            no_place = run("checkpoint", a, b)
            self.assertEqual(no_place.returncode, 2)
            self.assertIn("--out DIR", no_place.stderr)
            one_missing = run("checkpoint", a, "--out", folder + "/kept")
            self.assertEqual(one_missing.returncode, 1)
            self.assertIn("missing", one_missing.stderr)

            made = self.done("checkpoint", a, b, "--out", folder + "/kept")
            self.assertEqual(made["step"], step)
            self.assertEqual(made["checkpoint"], f"{folder}/kept/step-{step:08}")
            self.assertTrue(self.done("checkpoint", a, b, "--out", folder + "/kept")["existed"])
            self.assertEqual(run("fsck", made["checkpoint"]).returncode, 0)

            refused = run("restore", made["checkpoint"], "--device", a)
            self.assertEqual(refused.returncode, 1)
            self.assertIn("already holds run", refused.stderr)
            self.assertEqual(run("restore", a, "--device", c).returncode, 1)
            back = self.done("restore", made["checkpoint"], "--device", c)
            self.assertEqual((back["step"], back["blocks_without_checksum"]), (step, 0))
            self.assertEqual(self.state_of(c)["elements"], self.state_of(c)["run_elements"])
            self.assertNotEqual(self.state_of(c)["run"], self.state_of(a)["run"])
            self.assertEqual(run("fsck", c).returncode, 0)

            moved = self.done("reshard", "--from", c, "--to", d, "--state-format", "bf16")
            self.assertEqual(self.state_of(d)["state_format"], "bf16")
            self.assertEqual(self.state_of(d)["committed_step"], step)
            self.assertLess(moved["state_bytes"], back["state_bytes"])
            self.assertEqual(run("fsck", d).returncode, 0)
            self.assertEqual(run("reshard", "--from", d, "--to", d).returncode, 2)

            self.done("restore", made["checkpoint"], "--device", a, "--device", d, "--replace")
            self.assertEqual(self.state_of(d)["state_format"], "f32")
            self.assertEqual(run("fsck", a, d).returncode, 0)
            # The old state stays until the new one is whole, also when a later target cannot take its part.
            pathlib.Path(folder, "file").write_bytes(b"x")
            before = self.state_of(a)
            refused = run("restore", made["checkpoint"], "--device", a, "--device", folder + "/file", "--replace")
            self.assertNotEqual(refused.returncode, 0)
            self.assertEqual(self.state_of(a), before)
            # A description over the devices of another checkpoint is no checkpoint.
            mixed = folder + "/mixed"
            shutil.copytree(made["checkpoint"], mixed)
            other = self.done("checkpoint", c, "--out", folder + "/other")["checkpoint"]
            shutil.copy(other + "/checkpoint.json", mixed)
            for words in (("fsck", mixed), ("restore", mixed, "--device", folder + "/e"),
                          ("reshard", "--from", mixed, "--to", folder + "/e")):
                refused = run(*words)
                self.assertEqual(refused.returncode, 1, refused)
                self.assertIn("was put together from others", refused.stderr)
            self.assertFalse(os.path.exists(folder + "/e"))
            # Nothing is deleted for a checkpoint that turns out to be damaged.
            flip(made["checkpoint"] + "/device-0/smartinf.state", 1 << 20)
            self.assertEqual(run("fsck", made["checkpoint"]).returncode, 1)
            damaged = run("restore", made["checkpoint"], "--device", a, "--replace")
            self.assertEqual(damaged.returncode, 1)
            self.assertIn("nothing was replaced", damaged.stderr)
            self.assertEqual(run("fsck", a, d).returncode, 0)

    def test_gc(self):
        with tempfile.TemporaryDirectory() as folder:
            make_state(folder + "/a")
            other = pathlib.Path(folder) / "b"
            other.mkdir()
            (other / "smartinf.state.creating").write_bytes(bytes(100000))
            partial = pathlib.Path(folder) / "kept/step-00000007.partial"
            (partial / "device-0").mkdir(parents=True)
            (partial / "device-0/smartinf.state").write_bytes(b"x")

            def kinds(*words):
                done = run("gc", folder, "--json", *words)
                self.assertEqual(done.returncode, 0, done)
                return sorted((one["kind"], one["deleted"]) for one in json.loads(done.stdout)["leftovers"])

            # The checkpoint is of just now: somebody may be writing it.
            self.assertEqual(kinds(), [("interrupted creation", False)])
            for path in (*partial.rglob("*"), partial):
                os.utime(path, (1, 1))
            self.assertEqual([kind for kind, _ in kinds()],
                             ["interrupted checkpoint", "interrupted creation"])
            asked = run("gc", folder)
            self.assertIn("nothing was deleted", asked.stdout)
            self.assertTrue(partial.exists())
            self.assertEqual(len(kinds("--yes")), 2)
            self.assertFalse(partial.exists())
            self.assertEqual(os.listdir(other), ["smartinf.lock"])
            self.assertEqual(kinds(), [])
            # A whole state is deleted only when asked for, and never one in use.
            self.assertTrue(os.path.exists(folder + "/a/smartinf.state"))
            with open(folder + "/a/smartinf.lock", "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.assertEqual(kinds("--states", "--yes"), [])
            (pathlib.Path(folder) / "recipe.toml").write_text("", encoding="utf-8")
            self.assertEqual(kinds("--states", "--yes"), [])
            os.unlink(folder + "/recipe.toml")
            # Nor because it is offered: by the name of its run alone.
            run_id = self.state_of(folder + "/a")["run"]
            self.assertEqual(kinds("--states", "--yes"), [("state without a run's folder", False)])
            told = run("gc", folder, "--states", "--yes").stdout
            self.assertIn(f"run {run_id[:8]}, step ", told)
            self.assertIn(f"--delete-run {run_id[:8]} does it", told)
            self.assertEqual(run("gc", folder, "--delete-run", run_id[:4]).returncode, 2)
            self.assertEqual(run("gc", folder, "--delete-run", "00000000").returncode, 1)
            self.assertTrue(os.path.exists(folder + "/a/smartinf.state"))
            # A recipe that names it is enough to keep it, even against its name.
            recipe = pathlib.Path(folder) / "sub/mine.toml"
            recipe.parent.mkdir()
            recipe.write_text(f'[[device]]\npath = "{folder}/a"\n', encoding="utf-8")
            refused = run("gc", folder, "--delete-run", run_id[:8])
            self.assertEqual(refused.returncode, 1)
            self.assertIn("mine.toml", refused.stderr)
            recipe.unlink()
            self.assertEqual(kinds("--delete-run", run_id[:8]), [("state without a run's folder", True)])
            self.assertFalse(os.path.exists(folder + "/a/smartinf.state"))

    def test_gc_deletes_nothing_that_is_not_smartinfs(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("step-1-draft.partial/thesis.tex", "step-00000001.partial/thesis.tex",
                         "step-00000002.partial/device-0/smartinf.state", "step-00000002.partial/notes.txt",
                         "model.partial/model.safetensors", "other.0a1b2c3d.partial/.smartinf-export",
                         "other.0a1b2c3d.partial/notes.txt"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text("work", encoding="ascii")
            (root / "step-00000003.partial").symlink_to(root / "step-00000001.partial")
            for path in root.rglob("*"):
                os.utime(path, (1, 1), follow_symlinks=False)
            before = sorted(root.rglob("*"))
            done = run("gc", folder, "--yes", "--states")
            self.assertEqual(done.returncode, 0, done)
            self.assertEqual(sorted(root.rglob("*")), before, done.stdout)
            self.assertIn("step-00000001.partial: holds something that is not smartinf's", done.stdout)
            # What a killed export leaves is its own, and so is what one that runs is writing.
            (root / "other.0a1b2c3d.partial/notes.txt").unlink()
            with open(root / "other.0a1b2c3d.partial/.smartinf-export", encoding="ascii") as mark:
                fcntl.flock(mark, fcntl.LOCK_EX)
                self.assertIn("was written to within the last ten minutes", run("gc", folder, "--yes").stdout)
                self.assertTrue((root / "other.0a1b2c3d.partial").exists())
            self.assertIn("interrupted export", run("gc", folder, "--yes").stdout)
            self.assertFalse((root / "other.0a1b2c3d.partial").exists())
            self.assertTrue((root / "model.partial/model.safetensors").exists())


def table_at(file, begin, stride, step):
    with open(file, "rb") as state:
        state.seek(begin + (step % 2 * 2 + 1) * stride)
        return state.read(8) == b"SMRTINFT"


if __name__ == "__main__":
    unittest.main()
