"""`smartinf train` as several processes: the bits of one, whoever dies, and however many go on."""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import unittest

from rank_processes import Ranks
from train_runs import ALL, SMARTINF, STREAMED, StreamCase, TrainCase

KILLS = int(os.environ.get("SMARTINF_TEST_KILLS", "3"))  # 40 in scripts/nightly.sh
TIMEOUT_S = 6  # where ranks are killed
EXAMPLE = str(pathlib.Path(__file__).parents[1] / "examples" / "train_ranks.sh")


class TrainRanks(StreamCase):
    def command(self, recipe, run, flags=()):
        return super().command(recipe, run, [*flags, "--ranks.order", "fixed"])  # also one process alone

    def ranks(self, count, recipe, run, *flags, timeout=100):
        return Ranks(self.command(recipe, run, [*flags, "--ranks.timeout", str(timeout)]), count)

    def train_with(self, count, recipe, run, *flags, seconds=300):
        """On so many ranks, to the end."""
        with self.ranks(count, recipe, run, *flags) as ranks:
            self.assertEqual(ranks.wait(seconds), [0] * count,
                             [ranks.out(rank)[-500:] + ranks.err(rank) for rank in range(count)])
            for rank in range(1, count):
                self.assertEqual((ranks.out(rank), ranks.err(rank)), ("", ""), "only rank 0 speaks")
            return ranks.out(0)

    def median_norm(self, run):
        return str(statistics.median(line["gradient_norm"] for line in self.log(run) if "gradient_norm" in line))

    def check_bits(self, recipe, flags, less=()):
        """Of 2 and 4 ranks beside those of one process with more memory, with clipping in half of the steps."""
        flags = [*flags, "--json", "--train.validate_every", "4", "--train.sample_prompts", "def",
                 "--train.sample_tokens", "8"]
        self.train_with(1, recipe, "free", *flags, "--train.clip_norm", "0")
        flags += ["--train.clip_norm", self.median_norm("free")]
        said = self.train_with(1, recipe, "one", *flags)
        self.assertNotEqual(self.losses("one"), self.losses("free"))
        rows = lambda text, key: [row for row in map(json.loads, text.splitlines()) if key in row]
        for count in (2, 4):
            run = f"ranks{count}"
            of_ranks = self.train_with(count, recipe, run, *flags, *self.even_devices(run, 2), *less)
            self.check_same_as(run, "one")
            self.assertGreater(len(rows(of_ranks, "ranks_sent_bytes")), 0)
            for key in ("validation_loss", "samples"):
                self.assertTrue(rows(said, key))
                self.assertEqual(rows(of_ranks, key), rows(said, key))

    def test_a_resident_f32_model_has_the_same_bits_on_any_number_of_ranks(self):
        self.check_bits(self.recipe(steps=12, precision="f32"),
                        ["--train.accumulation", "5", "--train.micro_batch", "2", "--optimizer.format", "q4",
                         "--optimizer.master", "m24"])

    def test_an_embedding_on_devices_has_the_same_bits_on_any_number_of_ranks(self):
        """Three ranks of two devices, of which two have as many micro batches; then one process goes on."""
        recipe = self.recipe(steps=6)
        said = ["--json", "--train.validate_every", "3", "--train.sample_prompts", "def", "--train.sample_tokens", "4"]
        flags = [*said, "--model.tied_head", "false", "--table.embedding", "adamw", "--table.memory", "80MiB",
                 "--table.log", "2MiB", "--train.accumulation", "5", "--train.micro_batch", "1", "--checkpoint.every", "3",
                 "--train.clip_norm", "0.7", "--train.warmup_steps", "1", "--train.lr_floor", "1"]
        rows = lambda text, key: [row for row in map(json.loads, text.splitlines()) if key in row]
        one = self.train_with(1, recipe, "one", *flags)
        flags += self.even_devices("three", 2)
        told = self.train_with(3, recipe, "three", *flags, "--train.steps", "4")
        told += self.train_with(1, recipe, "three", *flags)
        self.check_same_as("three", "one")
        for key in ("validation_loss", "samples"):
            self.assertEqual(rows(told, key)[-1], rows(one, key)[-1])
        subprocess.run([SMARTINF, "fsck", str(self.folder / "three/checkpoints/step-00000003")], check=True,
                       capture_output=True)

    # How little memory is enough depends on what a process takes at its start, which varies: at night only.
    if ALL:
        def test_a_streamed_bf16_model_has_the_same_bits_on_any_number_of_ranks(self):
            flags = [*STREAMED, "--train.accumulation", "4", "--memory.activations", "recompute"]
            with self.ranks(2, self.recipe(steps=8), "refused", *flags, *self.even_devices("refused", 2),
                            "--memory.host", "50MiB") as ranks:
                self.assertEqual(ranks.wait(60), [1, 1])
                least = int(re.search(r"needs (\d+) MiB", ranks.err(0)).group(1))
            less = ["--memory.host", f"{least + 40}MiB"]
            # What a process takes before it trains differs by some MiB from one start to the next.
            for _ in range(5):
                with self.ranks(2, self.recipe(steps=8), "planned", *flags, *less, "--print-plan") as ranks:
                    self.assertEqual(ranks.wait(60), [0, 0], [ranks.out(0), ranks.err(0), ranks.err(1)])
                    planned = ranks.out(0)
                if "come from the devices" in planned:
                    break
            self.assertIn("come from the devices", planned)
            self.check_bits(self.recipe(steps=8), flags, less)

    def test_ranks_with_accelerators_have_the_bits_of_a_cpu(self):
        """Two stages; and two ranks that have so little memory there that weights come from the host's."""
        library = os.environ.get("SMARTINF_TEST_ACCELERATOR")  # tests/accelerator, which ctest knows
        if library is None:
            self.skipTest("SMARTINF_TEST_ACCELERATOR does not name the accelerator for tests")
        env = {"LD_PRELOAD": library}
        recipe = self.recipe(steps=4, precision="f32")
        flags = ["--model.layers", "4", "--train.accumulation", "4", "--train.micro_batch", "1"]
        self.train(recipe, "cpu", *flags)
        with Ranks(self.command(recipe, "stages", [*flags, *self.stages(2, "stages")]), 2, env=env) as ranks:
            self.assertEqual(ranks.wait(300), [0, 0], ranks.err(0) + ranks.err(1))
            self.assertIn("test_accelerator", ranks.out(0))
        self.check_same_as("stages", "cpu")
        told = self.train(recipe, "refused", *flags, "--memory.accelerator", "1KiB", env=env, code=1)
        least = float(re.search(r"needs ([0-9.]+) MiB of the accelerator's memory", told).group(1))
        flags += [*self.even_devices("ranks", 2), "--memory.accelerator", f"{1.1 * least:.2f}MiB"]
        with Ranks(self.command(recipe, "ranks", flags), 2, env=env) as ranks:
            self.assertEqual(ranks.wait(300), [0, 0], ranks.err(0) + ranks.err(1))
            self.assertIn("test_accelerator", ranks.out(0))
            self.assertRegex(ranks.out(0), r"weights: \d of 6 units stay on the accelerator, \d more in the host's memory")
        self.check_same_as("ranks", "cpu")

    def stages(self, count, run, ranks=None):
        """Flags of a pipeline on so many ranks, each with a device; stages end within subgroups."""
        return ["--ranks.pipeline", str(count), "--engine.subgroup_elements", "65536",
                *self.even_devices(run, ranks or count)]

    def test_stages_of_a_pipeline_have_the_bits_of_one_process(self):
        """Two of two ranks each and four, with a tied head on the first or the last; at night also others, and another head."""
        said = ["--train.validate_every", "2", "--train.sample_prompts", "def", "--train.sample_tokens", "8", "--json"]
        cases = {"tied": ("f32", 4, 5, ["--train.clip_norm", "0.7", "--memory.activations", "keep"],
                          (("fold", 2, 4), ("sync", 4, 4),
                           *((("sync", 2, 4), ("auto", 2, 2), ("fold", 3, 3), ("fold", 4, 4)) if ALL else ())))}
        if ALL:
            cases["many"] = ("f32", 8, 9, ["--memory.activations", "keep"], (("sync", 3, 6), ("fold", 4, 8)))
            cases["untied"] = ("bf16", 4, 5, ["--model.tied_head", "false", "--memory.activations", "recompute"],
                               (("auto", 2, 2),))
        for name, (precision, layers, count, more, shapes) in cases.items():
            recipe = self.recipe(steps=4, precision=precision)
            flags = ["--model.layers", str(layers), "--train.accumulation", str(count), "--train.micro_batch", "2", *more,
                     *said]
            rows = lambda text, key: [row for row in map(json.loads, text.splitlines()) if key in row]
            one = self.train_with(1, recipe, name, *flags, "--engine.subgroup_elements", "65536")
            for tied, stages, ranks in shapes:
                with self.subTest(name, tied=tied, stages=stages, ranks=ranks):
                    run = f"{name}_{tied}_{stages}_{ranks}"
                    told = self.train_with(ranks, recipe, run, *flags, *self.stages(stages, run, ranks), "--ranks.tied", tied)
                    self.check_same_as(run, name)
                    for key in ("validation_loss", "samples"):
                        self.assertTrue(rows(one, key))
                        self.assertEqual(rows(told, key), rows(one, key))
                    # What a stage sends: the activations of its micro batches, in the weights' type.
                    message = 2 * 32 * 96 * (4 if precision == "f32" else 2)
                    batches = count if ranks == stages else count // 2  # those of rank 0, which may also have the head
                    self.assertEqual({row["pipeline_sent_bytes"] for row in rows(told, "pipeline_sent_bytes")},
                                     {batches * message * (2 if tied == "fold" else 1)})

    def test_stages_in_chunks_have_the_bits_of_one_process(self):
        """Two of two chunks, which then go on as stages that stay; at night also of two ranks each, and with other heads."""
        said = ["--train.validate_every", "2", "--train.sample_prompts", "def", "--train.sample_tokens", "8", "--json",
                "--engine.subgroup_elements", "65536", "--model.layers", "4", "--train.accumulation", "5", "--train.micro_batch", "2",
                "--train.warmup_steps", "1", "--train.lr_floor", "1"]
        rows = lambda text, key: [row for row in map(json.loads, text.splitlines()) if key in row]
        recipe = self.recipe(steps=4)
        for tied, counts in (("true", (2, 4) if ALL else (2,)), *((("false", (2,)), ("fold", (2, 4))) if ALL else ())):
            folds = ["--ranks.tied", "fold"] if tied == "fold" else []
            flags = [*said, "--model.tied_head", "true" if folds else tied]
            one = self.train_with(1, recipe, f"one_{tied}", *flags)
            for ranks in counts:
                with self.subTest(tied=tied, ranks=ranks):
                    run = f"chunks_{tied}_{ranks}"
                    own = [*flags, *self.stages(2, run, ranks), *folds]
                    told = self.train_with(ranks, recipe, run, *own, "--ranks.chunks", "2", "--train.steps", "2")
                    # Of each chunk but the model's last a message forward, of each but its first one back.
                    self.assertEqual({row["pipeline_sent_bytes"] for row in rows(told, "pipeline_sent_bytes")},
                                     {(4 if folds else 3) * (5 if ranks == 2 else 2) * 2 * 32 * 96 * 2})
                    told += self.train_with(ranks, recipe, run, *own)
                    self.check_same_as(run, f"one_{tied}")
                    for key in ("validation_loss", "samples"):
                        self.assertEqual(rows(told, key)[-1], rows(one, key)[-1])

    def test_gradients_in_which_many_chunks_meet_do_not_take_the_few_buffers(self):
        flags = ["--model.layers", "16", "--model.width", "256", "--model.mlp_width", "704", "--train.micro_batch", "1",
                 "--train.accumulation", "2", "--memory.activations", "recompute", "--engine.memory_budget", "24MiB",
                 "--engine.subgroup_elements", "131072", "--engine.gradient_budget", "0"]
        recipe = self.recipe(steps=2)
        self.train_with(1, recipe, "one", *flags)
        self.train_with(2, recipe, "two", *self.stages(2, "two"), *flags, "--ranks.chunks", "8")
        self.check_same_as("two", "one")

    # As of ranks that stream: how little memory is enough varies.
    if ALL:
        def test_stages_whose_weights_come_from_the_devices_have_the_bits_of_one_process(self):
            # Weights are much more than what a process takes differs from one start to the next.
            flags = [*STREAMED, "--train.accumulation", "4", "--memory.activations", "recompute", "--model.width", "512",
                     "--train.warmup_steps", "1", "--train.lr_floor", "1"]
            recipe = self.recipe(steps=6)
            self.train_with(1, recipe, "one", *flags)
            for ranks in (4, 2):
                chunks = ["--ranks.chunks", "6"]
                with self.ranks(ranks, recipe, "refused", *flags, *self.stages(2, "refused", ranks), *chunks,
                                "--memory.host", "50MiB") as started:
                    self.assertEqual(started.wait(60), [1] * ranks)
                    least = max(int(re.search(r"needs (\d+) MiB", started.err(rank)).group(1)) for rank in range(ranks))
                chunks += ["--memory.host", f"{least + 8}MiB"]
                run = f"streamed_{ranks}"
                told = self.train_with(ranks, recipe, run, *flags, *self.stages(2, run, ranks), *chunks)
                self.assertIn("come from the devices", told)
                self.check_same_as(run, "one")
            # A stage cannot read what others have: it says so, and with memory for it the run goes on.
            own = [*flags, *self.stages(2, "elsewhere")]
            self.train(recipe, "elsewhere", *flags, *own[-8:], "--train.steps", "2")
            with self.ranks(2, recipe, "elsewhere", *own, *chunks) as started:
                self.assertEqual(started.wait(60), [1, 1])
                self.assertIn("The run was begun with another division", started.err(0) + started.err(1))
            self.train_with(2, recipe, "elsewhere", *own)
            self.check_same_as("elsewhere", "one")

    def test_compressed_gradients_between_stages_are_the_same_in_every_start(self):
        recipe = self.recipe(steps=4)
        flags = ["--train.accumulation", "4", "--train.micro_batch", "1", "--train.warmup_steps", "1", "--train.lr_floor", "1"]
        self.train_with(2, recipe, "whole", *flags, *self.stages(2, "whole"))
        for form in ("lowrank", "int4") if ALL else ("lowrank",):
            own = ["--compress.pipeline", form, "--compress.pipeline_when", "always", "--compress.pipeline_rank", "8",
                   "--compress.pipeline_forward", "int8", "--train.validate_every", "2"]
            for run, starts in ((form, ("4",)), (form + "_again", ("2", "4"))):
                for steps in starts:
                    self.train_with(2, recipe, run, *flags, *self.stages(2, run), *own, "--train.steps", steps)
            self.check_same_as(form + "_again", form)
            # Rank 0 sends the activations of four micro batches, 24 blocks of 128 values with a scale, and, as it has the
            # head, four gradients.
            back = {"lowrank": 8 * (32 + 96) * 2, "int4": 24 * (4 + 64)}[form]
            self.assertEqual({row["pipeline_sent_bytes"] for row in self.log(form) if "loss" in row},
                             {4 * (24 * (4 + 128) + back)})
            self.assertNotEqual(self.losses(form), self.losses("whole"))
            for (_, here), (_, there) in zip(self.losses(form), self.losses("whole"), strict=True):
                self.assertAlmostEqual(here / there, 1, delta=0.02)

    def test_the_boxes_and_links_of_a_file_choose_the_stages_and_what_is_compressed(self):
        recipe = self.recipe(steps=2)
        flags = ["--train.accumulation", "4", "--train.micro_batch", "1", "--model.width", "128", "--compress.pipeline_rank", "1",
                 "--model.tied_head", "false"]
        cluster = self.folder / "cluster.toml"
        for run, rate, stages, exposed in (("slow", "1 Mbit/s", "auto", "0, [1-9]"),
                                           ("fast", "1000000 Gbit/s", "2", "0, 0, so compressing them is not")):
            cluster.write_text("".join(f'[[box]]\nname = "box{i}"\nmachine = "workstation-gen4"\nranks = 1\n' for i in range(2)) +
                               f'[links]\nrate = "{rate}"\n')
            own = [*flags, *self.even_devices(run, 2), "--ranks.cluster", str(cluster)]
            told = self.train_with(2, recipe, run, *own, "--ranks.pipeline", stages,
                                   "--compress.pipeline", "lowrank", "--compress.pipeline_when", "exposed")
            self.assertIn("stage 1, rank 1", told)
            self.assertRegex(told, f"exposed gradients of a step, of each stage: {exposed}")
            sent = {row["pipeline_sent_bytes"] for row in self.log(run) if "loss" in row}
            self.assertEqual(sent, {4 * 32 * 128 * 2})
        cluster.write_text(cluster.read_text().replace("ranks = 1", "ranks = 2"))
        with self.ranks(2, recipe, "other", *own, "--ranks.pipeline", "auto") as ranks:
            self.assertEqual(ranks.wait(60), [2, 2])
            self.assertIn("has 4 ranks, and there are 2", ranks.err(0))

    COMPRESSED = ["--train.accumulation", "4", "--train.micro_batch", "1", "--train.warmup_steps", "1", "--train.lr_floor", "1",
                  "--model.tied_head", "false", "--compress.density", "0.1", "--compress.residual_every", "0"]

    def test_compressed_gradients_of_replicas_have_the_bits_of_any_schedule_and_stages(self):
        recipe = self.recipe(steps=5)
        dense = [*self.COMPRESSED, "--compress.stages", "0"]
        self.train_with(2, recipe, "dense", *dense, *self.even_devices("dense", 2))
        told = self.train_with(2, recipe, "late", *self.COMPRESSED, "--optimizer.overlap", "late", *self.even_devices("late", 3))
        self.assertIn("gradients: to each other replicas send the largest 10 % of the elements as signs", told)
        self.train_with(2, recipe, "none", *self.COMPRESSED, "--optimizer.overlap", "none", "--engine.subgroup_elements",
                        "131072", *self.even_devices("none", 2))
        self.check_same_as("none", "late")
        self.train_with(4, recipe, "stages", *self.COMPRESSED, "--ranks.pipeline", "2", *self.even_devices("stages", 4))
        self.check_same_as("stages", "late")
        self.assertNotEqual(self.losses("late"), self.losses("dense"))
        for (_, here), (_, there) in zip(self.losses("late"), self.losses("dense"), strict=True):
            self.assertAlmostEqual(here / there, 1, delta=0.4)
        sent = lambda run: statistics.median(row["ranks_sent_bytes"] for row in self.log(run) if "loss" in row)
        self.assertLess(sent("none"), 0.5 * sent("dense"))  # weights are half of it at least
        self.train_with(4, recipe, "first", *self.COMPRESSED, "--ranks.pipeline", "2", "--compress.stages", "1",
                        *self.even_devices("first", 4))
        self.assertNotIn(self.losses("first"), (self.losses("late"), self.losses("dense")))

    def test_a_compressed_run_of_ranks_goes_on_without_its_residual_and_says_so(self):
        recipe = self.recipe(steps=6)
        lost = "the residual of step 3 is not on the devices; training continues without it"
        for run in ("a", "b"):
            devices = self.even_devices(run, 2)
            self.train_with(2, recipe, run, *self.COMPRESSED, *devices, "--train.steps", "3")
            with self.ranks(2, recipe, run, *self.COMPRESSED, *devices) as ranks:
                self.assertEqual(ranks.wait(100), [0, 0], ranks.err(0) + ranks.err(1))
                self.assertIn(lost, ranks.err(0))
                self.assertEqual(ranks.err(1), "")
        self.check_same_as("b", "a")
        # Without error feedback there is none, and a rank that dies or other stages change no bit.
        own = [*self.COMPRESSED, "--compress.error_feedback", "false"]
        self.train_with(2, recipe, "whole", *own, *self.even_devices("whole", 2))
        devices = self.even_devices("c", 4)
        with self.ranks(2, recipe, "c", *own, *devices, timeout=TIMEOUT_S) as ranks:
            ranks.wait_for(0, "\nstep")
            ranks.processes[1].send_signal(signal.SIGKILL)
            self.assertEqual(ranks.wait(60, [0]), [1])
        self.train_with(4, recipe, "c", *own, *devices, "--ranks.pipeline", "2")
        self.check_same_as("c", "whole")

    def test_links_decide_whether_gradients_of_replicas_are_compressed(self):
        recipe = self.recipe(steps=2)
        cluster = self.folder / "cluster.toml"
        for stages, ranks in ((1, 2), (2, 4)):
            for rate, says in (("1 Mbit/s", "to each other replicas send the largest"),
                               ("1000000 Gbit/s", "dense, because compressing them is not worth it")):
                run = f"{stages}{rate[:2].strip()}"
                cluster.write_text("".join(f'[[box]]\nname = "box{i}"\nmachine = "workstation-gen4"\nranks = 1\n'
                                           for i in range(ranks)) + f'[links]\nrate = "{rate}"\n')
                told = self.train_with(ranks, recipe, run, *self.COMPRESSED, *self.even_devices(run, ranks), "--ranks.pipeline",
                                       str(stages), "--ranks.cluster", str(cluster), "--compress.stages", "auto")
                self.assertIn("gradients: " + says, told)

    def test_one_process_and_two_stages_add_gradients_in_the_same_order_by_themselves(self):
        recipe = self.recipe(steps=4)
        flags = ["--train.accumulation", "6", "--train.micro_batch", "1", "--model.layers", "3"]
        plain = lambda run, more=(): [*TrainCase.command(self, recipe, run, [*flags, *more])]
        subprocess.run(plain("one"), check=True, capture_output=True, timeout=300)
        with Ranks(plain("two", [*self.stages(2, "two"), "--ranks.split", "1, 2"]), 2) as ranks:
            self.assertEqual(ranks.wait(100), [0, 0], ranks.err(0) + ranks.err(1))
            self.assertIn("rank 0: the embedding, layers 0 to 0, the head;", ranks.out(0))
        self.check_same_as("two", "one")

    def test_a_state_goes_to_the_devices_of_its_stages(self):
        """That of one process with two devices, which each have a part of every stage."""
        recipe = self.recipe(steps=4)
        flags = ["--train.accumulation", "4", "--train.micro_batch", "1", "--model.layers", "3", "--model.width", "256",
                 "--train.warmup_steps", "1", "--train.lr_floor", "1", "--engine.subgroup_elements", "65536"]
        self.train_with(1, recipe, "one", *flags, *self.even_devices("one", 2))
        self.train_with(1, recipe, "moved", *flags, *self.even_devices("moved", 2), "--train.steps", "2")
        stages = [*flags, "--ranks.pipeline", "2", "--ranks.tied", "fold"]
        devices = [word for i in range(2) for word in (f"--device.{i}.path", str(self.folder / f"own{i}"),
                                                       f"--device.{i}.bandwidth", "1")]
        with self.ranks(2, recipe, "moved", *stages, *self.even_devices("moved", 2), "--train.steps", "2") as started:
            self.assertEqual(started.wait(100), [0, 0])
            crossing, = map(int, re.findall(r"weights of (\d+) parameters go .*; smartinf reshard --stages", started.out(0)))
            planned = lambda said: [float(found) for found in re.findall(r"optimizer: buffers and gradients ([0-9.]+) MiB", said)]
            exchanging = planned(started.out(0))
        reshard = [SMARTINF, "reshard", "--from", str(self.folder / "moved"), "--to", *devices[1::4], "--stages"]
        for wrong, text in (("3", "not as many for each of 3 stages"), ("2", "each of the 2 stages")):
            told = subprocess.run([*reshard, wrong, "--split", "9, 1"], capture_output=True, text=True, timeout=100)
            self.assertNotEqual(told.returncode, 0)
            self.assertIn(text, told.stderr)
        told = subprocess.run([*reshard, "2"], capture_output=True, text=True, check=True, timeout=100).stdout
        take_over = re.search(r"--take-over (\w+)", told)[1]
        with self.ranks(2, recipe, "moved", *stages, *devices, "--take-over", take_over) as started:
            self.assertEqual(started.wait(100), [0, 0], started.err(0) + started.err(1))
            left = [int(found) for found in re.findall(r"weights of (\d+) parameters go", started.out(0))]
            self.assertLess(max(planned(started.out(0))) + 30, min(exchanging), "memory to exchange all gradients, and next to none")
            self.assertNotIn("smartinf reshard --stages", started.out(0))
        self.assertLess(sum(left), crossing / 4, "subgroups in which two stages meet are left")
        self.check_same_as("moved", "one")

    def test_layers_go_to_the_stage_that_has_memory_for_them(self):
        """The embedding is no computing, and half of the first stage's memory."""
        recipe = self.recipe(steps=2)
        flags = ["--model.vocabulary", "32768", "--model.width", "256", "--model.mlp_width", "768", "--model.layers", "12",
                 "--model.tied_head", "false", "--train.accumulation", "2", "--train.micro_batch", "1"]
        self.train_with(1, recipe, "one", *flags)
        own = [*flags, *self.stages(2, "two"), "--ranks.chunks", "1"]
        with self.ranks(2, recipe, "two", *own, "--ranks.split", "12, 0", "--memory.host", "50MiB") as started:
            self.assertEqual(started.wait(60), [1, 1])
            least = int(re.search(r"needs (\d+) MiB", started.err(0)).group(1))
        told = self.train_with(2, recipe, "two", *own, "--memory.host", f"{least - 20}MiB")
        self.assertRegex(told, r"stage 0, rank 0: the embedding, layers 0 to \d;")
        self.check_same_as("two", "one")

    def test_a_stage_that_dies_is_named_and_any_other_pipeline_goes_on(self):
        recipe = self.recipe(steps=40)
        flags = ["--model.layers", "4", "--train.accumulation", "4", "--train.micro_batch", "1",
                 "--checkpoint.every", "10"]
        self.train(recipe, "whole", *flags, "--engine.subgroup_elements", "65536")
        devices = self.even_devices("a", 3)
        for stages, ranks, culprit in ((3, 3, 1), (2, 2, 0), (1, 2, 1), (2, 4, 3)):
            own = [*flags, *devices, "--ranks.pipeline", str(stages), "--engine.subgroup_elements", "65536"]
            with self.ranks(ranks, recipe, "a", *own, timeout=TIMEOUT_S) as started:
                started.wait_for(0, "\nstep")
                time.sleep(0.1)
                started.processes[culprit].send_signal(signal.SIGKILL)
                others = [rank for rank in range(ranks) if rank != culprit]
                self.assertEqual(started.wait(60, others), [1] * len(others))
                for rank in others:
                    self.assertIn(f"rank {culprit}", started.err(rank))
        # A signal to one stage stops all, and one process goes on alone.
        with self.ranks(3, recipe, "a", *own[:-4], "--ranks.pipeline", "3") as started:
            started.wait_for(0, "\nstep")
            started.processes[2].send_signal(signal.SIGTERM)
            self.assertEqual(started.wait(60), [130] * 3)
        self.train(recipe, "a", *flags, *devices)
        self.check_same_as("a", "whole")

    def test_a_pipeline_that_cannot_be_is_refused_with_what_can(self):
        recipe = self.recipe(steps=3)
        for flags, text in ((["--ranks.pipeline", "3"], "ranks.pipeline is 3, and there are 2 ranks"),
                            (["--ranks.pipeline", "2", "--train.accumulation", "1"], "Set it to 2 or a multiple"),
                            (["--ranks.pipeline", "2", "--memory.activations", "offload"], "Set it to \"recompute\""),
                            (["--ranks.pipeline", "2", "--ranks.split", "1, 9"], "the layers of each of the 2 stages"),
                            (["--ranks.split", "1, 1"], "ranks.pipeline is 1"),
                            (["--ranks.pipeline", "2", "--memory.host", "50MiB"], "the host's memory at least"),
                            (["--ranks.pipeline", "2", "--ranks.chunks", "1", "--memory.host", "50MiB"],
                             "of more stages each has less"),
                            (["--ranks.pipeline", "2", "--ranks.chunks", "9"], "Set it to"),
                            (["--ranks.chunks", "2"], "ranks.pipeline is 1"),
                            (["--compress.pipeline", "int8"], "ranks.pipeline is 1"),
                            (["--ranks.pipeline", "auto"], "names no file to choose by"),
                            (["--ranks.tied", "fold"], "ranks.pipeline is 1"),
                            (["--ranks.pipeline", "2", "--ranks.tied", "fold", "--model.tied_head", "false"],
                             "the head has a matrix of its own"),
                            (["--ranks.tensor", "2"], "divide the layers with ranks.pipeline")):
            with self.subTest(flags), self.ranks(2, recipe, "a", *flags) as ranks:
                self.assertTrue(all(code in (1, 2) for code in ranks.wait(60)))
                self.assertIn(text, ranks.err(0) + ranks.err(1))
        self.assertIn("ranks.pipeline is 2, and there is one process",
                      self.train(recipe, "a", "--ranks.pipeline", "2", code=2))

    def test_whoever_dies_is_named_and_any_number_of_ranks_goes_on(self):
        starts = 1 + (KILLS - 1) // 4
        recipe = self.recipe(steps=40 * starts + 16 * (KILLS - starts))
        flags = ["--train.accumulation", "4", "--train.micro_batch", "1", "--train.clip_norm", "0.7"]
        seconds = 300 + 60 * KILLS  # for all of the steps, on a machine that does something else as well
        self.train(recipe, "whole", *flags, timeout=seconds)
        flags += self.even_devices("killed", 2)
        draw = random.Random(os.environ.get("SMARTINF_TEST_SEED", "7"))
        for kill in range(KILLS):
            stages, count = ((1, 2), (2, 4), (3, 3), (1, 4), (2, 2), (1, 3))[kill % 6]
            culprit = draw.randrange(count)
            own = [*flags, "--ranks.pipeline", str(stages)]
            with self.ranks(count, recipe, "killed", *own, timeout=TIMEOUT_S) as ranks:
                # Most hit a step; one in four the start: meeting, creation, recovery, loading.
                if kill % 4 == 0:
                    time.sleep(draw.uniform(0, 3))
                else:
                    ranks.wait_for(0, "\nstep")
                    time.sleep(draw.uniform(0, 0.3))
                process = ranks.processes[culprit]
                process.send_signal(signal.SIGKILL if kill % 2 == 0 else signal.SIGSTOP)
                others = [rank for rank in range(count) if rank != culprit]
                began = time.monotonic()
                codes = ranks.wait(90, others)
                took = time.monotonic() - began
                told = "".join(ranks.err(rank) for rank in others)
            if codes == [0] * len(codes):
                break  # all steps are done
            print(f"kill {kill}: rank {culprit} of {count}, {stages} stages, {'killed' if kill % 2 == 0 else 'stopped'}, "
                  f"others ended after {took:.1f} s: {told.splitlines()[0][:160]}")
            self.assertEqual(codes, [1] * len(others), told)
            self.assertIn(f"rank {culprit}", told)
        self.train_with(2, recipe, "killed", *flags, seconds=seconds)
        self.check_same_as("killed", "whole")

    def test_a_signal_to_one_rank_stops_all_at_the_same_step(self):
        recipe = self.recipe(steps=30)
        flags = self.even_devices("a", 2)
        self.train(recipe, "whole")
        with self.ranks(2, recipe, "a", *flags) as ranks:
            ranks.wait_for(0, "\nstep")
            ranks.processes[1].send_signal(signal.SIGTERM)
            self.assertEqual(ranks.wait(60), [130, 130])
            self.assertIn("stopped at step", ranks.out(0))
        self.assertLess(len(self.losses("a")), 30)
        self.train(recipe, "a", *flags)  # one process goes on alone
        self.check_same_as("a", "whole")

    def test_a_rank_that_waits_for_the_others_is_ended_by_one_signal(self):
        with self.ranks(2, self.recipe(steps=3), "a") as ranks:
            ranks.processes[1].kill()  # before it comes
            time.sleep(2)
            ranks.processes[0].send_signal(signal.SIGINT)
            self.assertEqual(ranks.wait(5, [0]), [130])
            self.assertIn("interrupted", ranks.err(0))

    def test_checkpoints_of_ranks_are_those_of_one_process(self):
        recipe = self.recipe(steps=6)
        flags = ["--checkpoint.every", "3", "--train.keep_best", "true"]
        self.train(recipe, "one", *flags)
        self.train_with(2, recipe, "two", *flags, *self.even_devices("two", 2))
        names = lambda run: sorted(path.name for path in (self.folder / run / "checkpoints").iterdir())
        self.assertEqual(len(names("one")), len(names("two")))
        self.check_same_as("two", "one")

    def test_what_cannot_be_shared_is_refused_with_what_to_do(self):
        recipe = self.recipe(steps=3)
        for flags, texts in ((["--train.accumulation", "1"], ("train.accumulation is 1, but there are 2 ranks",)),
                             (["--compress.density", "0.1"],
                              ("compress.residual_every is 16, but the residuals of several ranks are not stored",)),
                             (["--compress.density", "0.1", "--compress.residual_every", "0", "--ranks.pipeline", "2",
                               "--model.layers", "2"], ("each stage is one rank's",)),
                             (["--compress.density", "0.1", "--compress.stages", "auto"],
                              ("compress.stages is \"auto\", but ranks.cluster names no file",)),
                             (["--optimizer.overlap", "early"], ("optimizer.overlap is \"early\", but",))):
            with self.subTest(flags), self.ranks(2, recipe, "a", *flags) as ranks:
                self.assertTrue(all(code in (1, 2) for code in ranks.wait(60)))
                for text in texts:
                    self.assertIn(text, ranks.err(0) + ranks.err(1))
        command = lambda rank: self.command(recipe, "b", ["--train.lr", f"0.00{1 + rank}", "--ranks.timeout", "5"])
        with Ranks(command, 2) as ranks:
            self.assertEqual(ranks.wait(60), [2, 2])
            self.assertIn("train.lr is 0.002 here, but 0.001 on rank 0", ranks.err(1))

    def test_a_folder_of_checkpoints_that_machines_do_not_share_is_refused_at_the_start(self):
        if os.geteuid() != 0 or not shutil.which("unshare"):
            self.skipTest("needs root, and unshare")
        folder = self.folder / "kept"
        folder.mkdir()
        # The second rank sees another file system there.
        other = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "sh"]
        flags = ["--checkpoint.every", "1", "--checkpoint.folder", str(folder), "--ranks.timeout", "20"]
        with Ranks(self.command(self.recipe(steps=3), "a", flags), 2,
                   prefix=lambda rank: other if rank == 1 else []) as ranks:
            self.assertEqual(ranks.wait(60), [2, 2])
            self.assertIn("is another folder on this rank's machine", ranks.err(0))
        self.assertEqual(list(folder.iterdir()), [])

    def test_the_example_starts_ranks_with_torchrun(self):
        torchrun = pathlib.Path(sys.executable).with_name("torchrun")
        if not torchrun.exists():
            self.skipTest("this Python has no torchrun")
        recipe = self.recipe(steps=6)
        self.train(recipe, "one")
        devices = [str(self.folder / name) for name in ("a", "b")]
        done = subprocess.run([EXAMPLE, recipe, *devices, "--train.run", str(self.folder / "two")],
                              env={**os.environ, "SMARTINF": SMARTINF,
                                   "PATH": f"{torchrun.parent}:{os.environ['PATH']}"},
                              capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.check_same_as("two", "one")


if __name__ == "__main__":
    unittest.main()
