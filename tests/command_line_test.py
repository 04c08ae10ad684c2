"""The smartinf command as a user meets it: messages, exit codes, JSON.

Usage: command_line_test.py PATH/TO/smartinf PROJECT_ROOT
"""
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import unittest

from command import COMMAND, ROOT, run


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
        self.refused("doctor", "--train.steps", "5", says="takes no recipe")

    def test_recipe_files(self):
        self.refused("train", "no/such.toml", says="no/such.toml")
        with tempfile.TemporaryDirectory() as folder:
            recipe = pathlib.Path(folder) / "r.toml"
            recipe.write_text("[model]\nlayres = 3\n", encoding="utf-8")
            self.refused("train", str(recipe), says="r.toml:2:1: unknown key 'model.layres'; "
                                                    "did you mean model.layers?")

    def test_paths_that_no_shell_has_seen(self):
        for words in (["export", "~/none", "--out=~/x"], ["fsck", "~/none"], ["restore", "~/none", "--device=~/x"]):
            done = run(*words, HOME="/home of/me")
            self.assertIn("/home of/me/none", done.stdout + done.stderr)
        self.refused("fsck", "$HOME/none", says="$HOME/none: variables in paths are expanded by shells only")
        self.refused("train", str(ROOT / "recipes/quickstart.toml"), "--train.run=${RUN}/x", "--print-config",
                     says="--train.run is ${RUN}/x: variables in paths")

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
        self.refused("simulate", "--layers", "2", "--hidden", "65", "--heads", "2", says="must divide the hidden size")
        self.refused("simulate", "--optimizer", "adm", says="adam?")
        self.refused("simulate", "--hide", "both", says="is now --overlap")
        self.refused("simulate", "--overlap", "auto", says="none, late, early")
        self.refused("simulate", "--overlap", "early", says="slots are too few")
        self.refused("simulate", "--overlap", "early", "--slots", "8", "--method", "su+o+c", says="compressed")
        self.refused("simulate", "--gpu", "A5001", says="A5000?")
        for flag, program in (("--figure=11", "figures"), ("--paper", "rows"), ("--closed-form", "closed_form")):
            self.refused("simulate", flag, says=f"Run python3 bench/paper/{program}.py")
        self.refused("simulate", "--sweep", "device=1..3", says="devices?")
        self.refused("simulate", "--sweep", "devices=0..3", says="at least 1")
        self.refused("simulate", "--machine", "./none.toml", says="./none.toml")
        self.refused("simulate", "--model", "./none.json", says="./none.json")
        self.refused("calibrate", "--device", ".", "--gpu", "A5001", says="A5000?")
        self.refused("calibrate", "--device", ".", "--out", "./none/m.toml", says="--out")
        self.refused("plan", "llama3-8C", says="llama3-8B?")
        self.refused("plan", "llama3-8B", "--machine", "workstation-gen6", says="workstation-gen")
        self.refused("plan", "llama3-8B", "--hide", "forward", says="is now --overlap")
        self.refused("plan", "llama3-8B", "--stages", "2", says="add --cluster FILE")
        self.refused("plan", "llama3-8B", "--cluster", "c.toml", says="Give --tokens-per-step")
        self.refused("plan", "llama3-8B", "--cluster", "c.toml", "--machine", "workstation-gen4", says="leave it or --cluster out")
        self.refused("plan", "llama3-8B", "--cluster", "c.toml", "--tokens-per-step", "8192", says="cannot read the cluster")
        self.refused("calibrate", says="--device is required")
        self.refused("plan", "llama3-8B", "--table", "1e6", says="Write e.g. 4e7x64")
        self.refused("plan", "llama3-8B", "--table-zipf", "1", says="add --table ROWSxDIM")
        self.refused("plan", "llama3-8B", "--table", "4e9x64", says="Give the table")
        for command in ("plan", "simulate"):
            for words, says in ((["llama3-8C"], "llama3-8B?"), (["llama3-8B", "--context", "0"], "at least 1"),
                                (["llama3-8B", "--tokens", "many"], "not a number"),
                                (["llama3-8B", "--prefix", "9000"], "shared prefix of 9000 tokens in prompts of 8192"),
                                (["llama3-8B", "--cache-format", "q4"], "q8?"),
                                (["llama3-8B", "--memory", "8 potatoes"], "not a size"),
                                (["llama3-8B", "--memory", "1GB"], "generating needs"),
                                (["llama3-8B", "--context", "100000000", "--tokens", "10"], "beyond 1e8"),
                                (["llama3-8B", "--cache-in", "drives"], "auto, memory, devices"),
                                (["llama3-8B", "--cache-in", "memory"], "--cache-in memory"),
                                (["llama3-8B", "--batch", "2"], "training step"),
                                (["llama3-8B", "--write-back", "0"], "at least 1"),
                                (["llama3-8B", "--inputs", "2"], "from 0 to 1"),
                                (["bert-0.11B", "--context", "100"], "decoder"),
                                (["gpt2-0.12B"], "1024 positions"),
                                (["llama3-405B", "--sequences", "1", "--context", "9000000"], "keys and values")):
                self.refused(command, "--generate", *words, says=says)
            self.refused(command, "--context", "5", says="add --generate MODEL")
        self.refused("plan", "llama3-8B", "--generate", "llama3-8B", says="MODEL is given with --generate")
        self.refused("plan", "--generate", "llama3-8B", "--html", "x.html", says="--html is given with --generate")
        self.refused("simulate", "--generate", "llama3-8B", "--trace", "x.json", says="--trace is given")
        for words, says in ((["--memory", "ddr4-2400"], "ddr4-2400-x8?"), (["--pattern", "row"], "stream"),
                            (["--pattern", "words", "--banks", "17"], "17 banks, but ddr4-2400-x8 has 16"),
                            (["--pattern", "words", "--words-per-row", "129"], "128 bursts"),
                            (["--pattern", "topk", "--share", "0"], "a share of 0"), (["--requests", "0"], "--requests")):
            self.refused("simulate", "memory", *words, says=says)
        self.refused("simulate", "--generate", "llama3-8B", "--sweep", "sequences=none,4", says="not a number")
        good = run("simulate", "--machine", "workstation-gen4", "--print-machine").stdout
        with tempfile.TemporaryDirectory() as folder:
            machine = pathlib.Path(folder) / "m.toml"
            for wrong, says in ((good.replace("link_bytes_per_s", "lnik_bytes_per_s", 1), "link_bytes_per_s?"),
                                (good.replace("read_bytes_per_s = ", "read_bytes_per_s = -", 1), "above zero"),
                                (good.replace("[host]", "[hots]"), "host?"),
                                (good.replace("[[device]]", "[device]"), "write [[device]]"),
                                (good.replace("[gpu]", "[gpu"), "m.toml:3:"),
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
        for command in ("train", "doctor", "inspect", "fsck", "checkpoint", "restore", "reshard", "gc", "bench step", "bench kernels",
                        "bench attend", "certificates", "serve"):
            done = run(*command.split(), "--help")
            self.assertEqual(done.returncode, 0, done)
            self.assertIn("Examples:", done.stdout, command)

    def test_types_are_named_plainly_and_examples_are_the_commands_own(self):
        shown = {words: run(*words.split(), "--help").stdout
                 for words in ("bench", "bench step", "bench kernels", "bench attend", "plan",
                               "simulate", "simulate memory", "calibrate", "export", "doctor", "reshard")}
        for command, text in shown.items():
            self.assertNotRegex(text, r"\b(FLOAT|UINT|INT|TEXT):|:\{| in \[\d", command)
            self.assertNotRegex(text, r"\d]? *=", command)
            self.assertIn(f"  smartinf {command.split()[0]}", text.split("Examples:")[-1], command)
            self.assertNotIn("smartinf train recipes/quickstart", text, command)
        self.assertRegex(shown["bench step"], r"--params NUMBER \[2e\+08\]")
        self.assertRegex(shown["bench step"], r"--state-format f32\|bf16\|q8\|q4\s")
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

    def test_a_stack_too_small_for_torch_is_raised_or_refused(self):
        if not (pathlib.Path(COMMAND).parent / "smartinf-torch").exists():
            self.skipTest("this build has no torch")
        small = 128 << 10
        for hard, code in ((resource.RLIM_INFINITY, 0), (small, 1)):
            hard = hard if code else resource.getrlimit(resource.RLIMIT_STACK)[1]
            done = subprocess.run([COMMAND, "train", "--help-recipe=markdown"], capture_output=True, text=True, check=False,
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (small, hard)))
            self.assertEqual(done.returncode, code, done)
        self.assertRegex(done.stderr, r"^smartinf: the stack of a thread may have 128 KiB.* \(ulimit -s 8192\)")

    def test_an_address_space_too_small_for_torch_is_named(self):
        if not (pathlib.Path(COMMAND).parent / "smartinf-torch").exists():
            self.skipTest("this build has no torch")
        done = subprocess.run([COMMAND, "train", "recipe.toml"], capture_output=True, text=True, check=False,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20)))
        self.assertEqual(done.returncode, 1, done)
        self.assertRegex(done.stderr, r"^smartinf: torch cannot be loaded within an address space of 200 MiB.*ulimit -v")

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

    def test_a_cluster_has_the_five_fastest_ways_a_page_and_a_trace(self):
        with tempfile.TemporaryDirectory() as folder:
            at = lambda name: os.path.join(folder, name)
            pathlib.Path(at("c.toml")).write_text("name = 'desk'\n" + "".join(
                f"[[box]]\nname = '{name}'\nmachine = 'workstation-gen4'\nranks = 1\n" for name in ("left", "right")) +
                "[links]\nrate = '1 Gbit/s'\nspread = 0.02\n", encoding="ascii")
            words = ["--cluster", at("c.toml"), "--tokens-per-step", "65536", "--seq", "1024"]
            plan, _ = self.planned("llama3-1B", *words, "--html", at("plan.html"), "--recipe", at("r.toml"))
            times = [option["total_s"] for option in plan["options"]]
            self.assertEqual(len(times), 5)
            self.assertEqual(times, sorted(times))
            self.assertTrue(all(option["least_s"] <= option["total_s"] * 1.0001 for option in plan["options"]))
            page = pathlib.Path(at("plan.html")).read_text(encoding="utf-8")
            self.assertEqual(json.loads(re.search(r"const plan = (.*);\n", page)[1])["options"], plan["options"])
            for forms in ("int8,", "", ",int8", "int8;int4", "none"):
                refused = run("plan", "llama3-1B", *words, "--compress", forms)
                self.assertEqual(refused.returncode, 2, refused)
                self.assertIn("Give some of int8, int4, lowrank, with commas", refused.stderr)
            # What is written is a recipe.
            self.assertEqual(run("train", at("r.toml"), "--print-config").returncode, 0)
            done = run("simulate", "--model", "llama3-1B", *words, "--stages", "2", "--batch", "1", "--trace", at("t.json"))
            self.assertEqual(done.returncode, 0, done)
            self.assertIn("start it with", done.stdout)
            events = json.loads(pathlib.Path(at("t.json")).read_text(encoding="utf-8"))["traceEvents"]
            self.assertEqual(sum(event.get("name") == "F63" for event in events), 4,
                             "two stages, and messages to the second one and to the head, which is on the first")

    def test_memory_is_what_the_programs_hold(self):
        """`train` streams what does not stay; Python keeps all weights, and gradients unless they are released."""
        plan, _ = self.planned("llama3-8B", "--gpu", "4090", "--devices", "2", "--batch", "8",
                               "--with", "train")
        self.assertTrue(plan["fits"])
        self.assertLess(plan["gpu_bytes"], 24e9)
        self.assertLess(plan["streaming"]["units_on_gpu"], plan["streaming"]["units"])
        plan, _ = self.planned("llama3-8B", "--gpu", "4090", "--devices", "2", "--batch", "512", "--with", "train")
        self.assertFalse(plan["fits"])
        self.assertIn("It does not fit, with smartinf train: GPU memory lacks", plan["result"])
        self.assertIn("a GPU with memory of", plan["buy_next"][0]["what"])
        plan, _ = self.planned("llama3-8B", "--batch", "1")
        self.assertTrue(plan["fits"])
        self.assertEqual(plan["with"], "smartinf train")
        self.assertEqual([one["fits"] for one in plan["uses"]], [True, False, True, True])
        self.assertIn("wears the drives out", plan["result"])
        self.assertEqual({option["overlap"] for option in plan["options"]}, {"late"})
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
            for model, feature in (("bert-0.11B", 'model_type is "bert"'), ("llama3-8B --batch 512", "would not fit")):
                done = run("plan", *model.split(), "--recipe", str(recipe))
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

    def test_generation(self):
        words = ["--context", "32768", "--sequences", "64", "--tokens", "512"]
        plan, _ = self.planned("--generate", "llama3-8B", *words)
        kept = 64 * 32 * (33280 // 32 + 2) * 131072
        self.assertEqual((plan["cache_bytes"], plan["device_bytes"], plan["together"]), (kept, kept // 4, 64))
        self.assertAlmostEqual(plan["tokens_per_s"], 64 / plan["step_s"], delta=1e-6)
        self.assertAlmostEqual(plan["decode_s"], 512 * plan["step_s"], delta=1e-6 * plan["decode_s"])
        self.assertEqual(plan["drive_written_bytes"], 64 * 33280 * 131072)
        self.assertEqual(sum(plan["host_parts"].values()), plan["host_bytes"])
        self.assertEqual(plan["command"], "", "there is no command for a GPU beside devices")
        half, _ = self.planned("--generate", "llama3-8B", *words, "--cache-format", "q8")
        self.assertAlmostEqual(half["drive_read_bytes"] / plan["drive_read_bytes"], 69632 / 131072, delta=1e-6)
        self.assertGreater(half["drive_life_days"], 0)
        few, _ = self.planned("--generate", "llama3-8B", *words[:2], "--sequences", "10000")
        self.assertEqual(few["held_by"], "drives")
        self.assertLess(few["together"], 10000)
        row = json.loads(run("simulate", "--generate", "llama3-8B", *words, "--json").stdout)
        self.assertEqual(row["step_s"], plan["step_s"])
        self.assertEqual(row["drive_read_bytes"] * 512, plan["drive_read_bytes"])
        rows = run("simulate", "--generate", "llama3-8B", "--sweep", "devices=1..3", "--json").stdout.splitlines()
        self.assertEqual([json.loads(row)["devices"] for row in rows], [1, 2, 3])
        shown = run("plan", "--generate", "llama3-8B", *words).stdout
        for says in ("64 prompts of 32768 tokens", "unfinished blocks", "written", "limit"):
            self.assertIn(says, shown)
        self.assertIn("tokens/s, bound by", run("simulate", "--generate", "llama3-8B").stdout)

    def test_simulated_memory(self):
        rows = {}
        for pattern in ("random", "rows", "topk"):
            done = run("simulate", "memory", "--pattern", pattern, "--requests", "50000", "--check", "--json")
            rows[pattern] = json.loads(done.stdout)
        self.assertAlmostEqual(rows["random"]["between_refreshes_bytes_per_s"] / 11.8e9, 1, delta=0.03)
        self.assertNotIn("gain", rows["random"])
        self.assertGreater(rows["topk"]["gain"], 2.5)
        self.assertGreater(rows["topk"]["in_bank_used_share"], 2.5 * rows["topk"]["used_share"])
        self.assertLess(rows["rows"]["gain"], 0.6)
        self.assertAlmostEqual(sum(rows["topk"][f"{cause}_share"] for cause in (
            "data", "bank", "activates", "columns", "turnaround", "refresh", "requests")), 1, delta=1e-9)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "memory.toml")
            text = run("simulate", "memory", "--print-memory").stdout
            path.write_text(text)
            again = json.loads(run("simulate", "memory", "--pattern", "topk", "--requests", "50000", "--check",
                                   "--json", "--memory", path).stdout)
            self.assertEqual(again, rows["topk"])
            path.write_text(text.replace("tRAS = 39", "tRAS = 20"))
            refused = run("simulate", "memory", "--memory", path)
            self.assertEqual(refused.returncode, 2, refused)
            self.assertIn("tRAS 20 is less than tRCD + tRTP = 25", refused.stderr)

    def test_a_plan_has_a_table(self):
        plan, _ = self.planned("llama3-8B", "--batch", "1", "--table", "1e6x64", "--table-ids", "4", "--table-zipf", "1")
        table = plan["table"]
        self.assertEqual(table["ids"], 4 * 2048)
        self.assertLess(table["rows_of_step"], table["ids"])
        self.assertGreater(table["rows_of_step"], table["ids"] / 4)
        self.assertGreater(table["total_s"], plan["total_s"])
        self.assertLess(table["drive_life_days"], plan["drive_life_days"] * 1.5)
        self.assertLess(table["drive_written_bytes"], table["dense_bytes"] / 2)
        row = json.loads(run("simulate", "--table", "1e6x64", "--json").stdout)
        self.assertAlmostEqual(row["with_table_s"], row["total_s"] + row["table_step_s"], delta=1e-9)

    def test_a_plan_of_generation_has_its_command(self):
        with tempfile.TemporaryDirectory() as folder:
            machine = pathlib.Path(folder) / "m.toml"
            text = MACHINE.read_text(encoding="utf-8").replace(
                'preset = "RTX4090"', 'name = "none"\npeak_flops = 1e12\nmemory_bytes_per_s = 5e10\n'
                "link_bytes_per_s = 1e10").replace("count = 4", "count = 1\non_host_cores = true")
            machine.write_text(text.replace("NVMe PCIe Gen4 x4", folder), encoding="utf-8")
            words = ["--generate", "llama3-1B", "--machine", str(machine), "--sequences", "8"]
            plan, _ = self.planned(*words, "--cache-in", "devices", "--memory", "8GB")
            self.assertEqual(plan["command"], f"smartinf generate FOLDER --batch prompts.jsonl --out answers.jsonl --tokens 128 "
                                              f"--sequences 8 --cache {folder}/kv --type bf16 --memory 8GB")
            plan, _ = self.planned(*words)
            self.assertEqual(plan["cache_in"], "memory")
            self.assertEqual(plan["drive_written_bytes"] + plan["enough_devices"], 0)
            self.assertNotIn("--cache", plan["command"])
            plan, _ = self.planned(*words, "--cache-in", "devices", "--devices", "3")
            self.assertEqual(plan["command"].count("--cache DIR"), 3)

    def test_the_page_holds_the_plan_and_what_it_draws(self):
        with tempfile.TemporaryDirectory() as folder:
            page, machine = (pathlib.Path(folder) / name for name in ("plan.html", "m.toml"))
            text = run("simulate", "--machine", "workstation-gen4", "--print-machine").stdout
            machine.write_text(text.replace("'workstation-gen4'", "'</script> & \"mine\"'", 1), encoding="utf-8")
            words = ["plan", "llama3-8B", "--batch", "1", "--machine", str(machine), "--table", "1e6x64"]
            plan = json.loads(run(*words, "--json", "--html", str(page)).stdout)
            text = page.read_text(encoding="utf-8")
            self.assertEqual(text.count("</script>"), 1, "what is in the plan does not end the script")
            shown = json.loads(re.search(r"(?m)^const plan = (.*);$", text).group(1))
            self.assertEqual(shown["machine"], '</script> & "mine"')
            for key in ("total_s", "buy_next", "overlap_total_s", "fits", "table"):
                self.assertEqual(shown[key], plan[key])
            for key in set(re.findall(r"\bof\.(\w+)", re.search(r"function rows.*?\n}", text, re.S)[0])):
                self.assertIn(key, shown["table"])
            self.assertRegex(shown["headline"], r"^It fits, with smartinf train")
            self.assertEqual([one["label"] for one in shown["options"] if one["best"]],
                             ["devices update, overlapped: " + plan["recommended"]])
            self.assertTrue(all(one["wears_soon"] == (0 < one["drive_life_days"] < 60) for one in shown["options"]))
            self.assertEqual([point["devices"] for point in shown["by_devices"]], list(range(1, 9)))
            self.assertIn(shown["total_s"], [point["total_s"] for point in shown["by_devices"]])
            # Each key that the page asks the plan for is there.
            for key in set(re.findall(r"\bplan\.(\w+)", text)):
                self.assertIn(key, shown)


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


class Bench(unittest.TestCase):
    def row(self, *words):
        done = run("bench", *words, "--json")
        self.assertEqual(done.returncode, 0, done)
        return json.loads(done.stdout)

    def program(self, name, *words):
        """A program of bench/ that runs the command."""
        done = subprocess.run([sys.executable, ROOT / "bench" / name, *words, "--json"], capture_output=True, text=True,
                              timeout=120, env={**os.environ, "SMARTINF": COMMAND}, check=False)
        self.assertEqual(done.returncode, 0, done)
        return json.loads(done.stdout)

    def test_traffic_is_the_papers_table(self):
        row = self.program("traffic.py", "--params", str(1 << 20))
        self.assertEqual((row["host_update_m"], row["smartupdate_f32_m"], row["smartupdate_bf16_m"]), (16, 4, 2))

    def test_scale_is_bounded_by_the_links_and_traced(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder) / "trace.json"
            result = self.program("scale.py", "--devices", "1,2", "--params", str(1 << 20), "--internal-read", "400MB",
                                  "--internal-write", "300MB", "--host-link", "500MB", "--slow-device", "0.5",
                                  "--trace", str(trace))
            self.assertEqual([row["devices"] for row in result["rows"]], [1, 2])
            for row in result["rows"]:
                for scheme in ("host_update", "naive", "overlapped"):
                    self.assertGreater(row[f"{scheme}_ratio"], 0.9, row)
                self.assertNotIn("overlapped_simulated_s", row, "unequal devices are not simulated")
            groups = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"]
                      if e["name"] == "process_name"}
            self.assertEqual(groups, {"device 0", "device 1", "device 0 internal link", "device 1 internal link",
                                      "host link"})

    def test_scale_stands_beside_the_simulator(self):
        """How close they are, docs/results/simulator.md says: a busy machine's times prove nothing."""
        result = self.program("scale.py", "--devices", "1,2", "--params", str(1 << 20), "--internal-read", "40MB",
                              "--internal-write", "30MB", "--host-link", "60MB", "--shared", "none", "--subgroups", "8")
        for row in result["rows"]:
            for scheme in ("host_update", "naive", "overlapped", "compressed"):
                self.assertGreater(row[f"{scheme}_simulated_s"], 0, row)
            # One after another or both ways at once: the schedules differ on the virtual clock, too.
            self.assertGreater(row["naive_simulated_s"], 1.3 * row["overlapped_simulated_s"], row)

    def test_attention_from_drives_stands_beside_the_same_reads(self):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--tokens", "1024", "--sequences", "3", "--kv-heads", "2", "--heads", "4", "--repeat", "1"]
            devices = ["--device", folder + "/a", "--device", folder + "/b"]
            for name in ("a", "b"):
                os.mkdir(f"{folder}/{name}")
            row = self.row("attend", *devices, *words, "--format", "q8")
            self.assertEqual(row["devices"], 2)
            self.assertEqual(row["bytes"], 3 * 32 * 20480)
            self.assertGreater(row["share_of_read"], 0)
            self.assertEqual([path for path in pathlib.Path(folder).rglob("smartinf.*") if path.suffix != ".tuning"], [])
            self.assertIn("of the same reads alone", run("bench", "attend", *devices[:2], *words).stdout)
            for wrong, says in ((["--tokens", "33"], "multiple of 32"), (["--tokens", "32", "--sequences", "1"], "Give more --tokens"),
                                (["--device", "grpc://nas:7443/fast0"], "smartinf bench attend there")):
                done = run("bench", "attend", *devices, *wrong)
                self.assertEqual(done.returncode, 1, done)
                self.assertIn(says, done.stderr)

    def test_a_step_has_devices_of_one_kind(self):
        self.assertIn("scale.py", run("bench", "scale", "--devices", "1").stderr)
        self.assertIn("traffic.py", run("bench", "traffic").stderr)
        for words in ([], ["--device", "none", "--emulated", "2"]):
            self.assertEqual(run("bench", "step", *words).returncode, 2)

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


class Interrupted(unittest.TestCase):
    def test_while_torch_is_loaded(self):
        """A signal that comes between the command and the program that it goes on as, which has torch to load first."""
        torch = pathlib.Path(COMMAND).with_name("smartinf-torch")
        if not torch.exists():
            self.skipTest("built without torch")
        with tempfile.TemporaryDirectory() as folder:
            command = pathlib.Path(shutil.copy2(COMMAND, folder))
            between = command.with_name("smartinf-torch")
            for number in ("INT", "TERM"):
                between.write_text(f'#!/bin/sh\nkill -{number} $$\nexec "{torch}" "$@"\n', encoding="utf-8")
                between.chmod(0o755)
                done = subprocess.run([command, "train", ROOT / "recipes/quickstart.toml", "--print-config"],
                                      capture_output=True, text=True, timeout=120, check=False)
                self.assertEqual(done.returncode, 130, done)
                self.assertIn("interrupted", done.stderr)


if __name__ == "__main__":
    unittest.main()
