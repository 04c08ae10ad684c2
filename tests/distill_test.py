"""smartinf distill: killed, stopped and divided among ranks it makes the same student, which transformers loads.

Usage: distill_test.py SMARTINF
"""
import json
import math
import os
import random
import re
import signal
import subprocess
import time
import unittest

from rank_processes import Ranks
from train_runs import ALL, SMARTINF, TrainCase

KILLS = int(os.environ.get("SMARTINF_TEST_KILLS", "4"))  # more at night
STEPS = 24


class Distill(TrainCase):
    def setUp(self):
        super().setUp()
        self.train(self.recipe(steps=60, precision="f32"), "teacher_run", "--model.layers", "4")
        self.teacher = self.export("teacher_run", "teacher")
        for file in self.teacher.glob("tokenizer*.json"):  # tokens are bytes: none have to be made
            file.unlink()
        (self.folder / "distill.toml").touch()

    def distill(self, run, *flags, layers=("--student.prune", "ffn=0.5,heads=0.5")):
        return [SMARTINF, "distill", str(self.folder / "distill.toml"), "--data.paths", str(self.corpus),
                "--data.sequence", "32", "--data.validation_share", "0.1", "--train.run", str(self.folder / run),
                "--train.steps", str(STEPS), "--train.micro_batch", "4", "--train.accumulation", "2",
                "--train.threads", "1", "--train.precision", "f32", "--train.lr", "3e-3", "--train.weight_decay", "0",
                "--teacher.from", str(self.teacher), "--engine.io_size", "1MiB", "--engine.io_depth", "4",
                "--engine.memory_budget", "32MiB", "--train.accelerator", "cpu", *layers, *flags]

    def run_it(self, *arguments, code=0, **layers):
        done = subprocess.run(self.distill(*arguments, **layers), capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, code, done.stdout[-2000:] + done.stderr[-2000:])
        return done.stdout + done.stderr

    def student(self, run):
        return (self.folder / run / "student" / "model.safetensors").read_bytes()

    def test_killed_at_random_moments(self):
        said = self.run_it("whole")
        self.assertIn("perplexity on data held out", said)
        draw = random.Random(os.environ.get("SMARTINF_TEST_SEED", "7"))
        kills = 0
        while kills < KILLS:
            process = self.held(self.distill("killed", "--train.log_every", "1"))
            if kills % 4 == 0:  # its start
                time.sleep(draw.uniform(0, 2))
            else:
                for line in process.stdout:
                    if line.startswith("layer"):
                        break
                time.sleep(draw.uniform(0, 0.2))
            process.kill()
            output = process.communicate()
            self.assertEqual(process.returncode, -signal.SIGKILL, output)
            kills += 1
        self.run_it("killed")
        self.assertEqual(self.student("killed"), self.student("whole"))
        # Log and picture of it.
        steps = [line["step"] for line in self.log("killed") if "block" in line]
        self.assertEqual(steps, list(range(1, 4 * STEPS + 1)))

    def test_any_number_of_ranks_makes_the_same_student(self):
        self.run_it("alone")
        for world in (2, 3):
            run = f"ranks_{world}"
            with Ranks(self.distill(run), world) as ranks:
                self.assertEqual(ranks.wait(300), [0] * world, "".join(map(ranks.err, range(world))))
            self.assertEqual(self.student(run), self.student("alone"))
            self.assertEqual(len([line for line in self.log(run) if "block" in line]), 4 * STEPS)
        # Killed with its ranks, it goes on with another number of them.
        with Ranks(self.distill("changed", "--train.log_every", "1"), 2) as ranks:
            ranks.wait_for(0, "layer 1/4")
            time.sleep(0.2)
        self.run_it("changed")
        self.assertEqual(self.student("changed"), self.student("alone"))

    def test_stages_are_read_by_one_process_too(self):
        for stages in ("2,", "2;2", "none"):
            done = subprocess.run(self.distill("refused", "--distill.stages", stages), capture_output=True, text=True, timeout=300)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(stages, done.stderr)

    def run_stages(self, run, stages, *flags, world, code=0):
        with Ranks(self.distill(run, "--distill.stages", stages, *flags), world) as ranks:
            self.assertEqual(ranks.wait(300), [code] * world, ranks.out(0) + "".join(map(ranks.err, range(world))))
            return ranks.out(0) + ranks.err(0)

    def test_ranks_that_share_layers_make_the_same_student(self):
        for kind, layers, divisions in (("pruned", ("--student.prune", "ffn=0.5,heads=0.5"),
                                         (("4x2", 2), *((("3x2,1", 3), ("1x2,3x3", 5)) if ALL else ()), ("1,3x2", 3))),
                                        ("int4", ("--student.quantise", "int4,group=32"), (("2x3,2", 4),))):
            def distill(run, *flags):
                return self.distill(run, *flags, "--train.accumulation", "5", "--train.micro_batch", "2", layers=layers)
            alone = f"{kind}_alone"
            subprocess.run(distill(alone), check=True, capture_output=True, timeout=300)
            for stages, world in divisions:
                run = f"{kind}_{stages}"
                with Ranks(distill(run, *self.devices(run, 2), "--distill.stages", stages), world) as ranks:
                    self.assertEqual(ranks.wait(300), [0] * world, "".join(map(ranks.err, range(world))))
                self.assertEqual(self.student(run), self.student(alone), stages)
                losses = sorted((line["block"], line["block_step"], line["loss"]) for line in self.log(run)
                                if "block" in line)
                self.assertEqual(losses, sorted((line["block"], line["block_step"], line["loss"])
                                                for line in self.log(alone) if "block" in line))
            # Killed, it goes on with other divisions.
            run = f"{kind}_killed"
            draw = random.Random(3)
            for stages, world in (("4x2", 2), ("1,3x2", 3), ("2x2,2", 3)):
                with Ranks(distill(run, *self.devices(run, 2), "--train.log_every", "1", "--distill.stages", stages),
                           world) as ranks:
                    ranks.wait_for(0, "layer 1/4" if stages == "4x2" else "rank 0")
                    time.sleep(draw.uniform(0.1, 0.6))
            subprocess.run(distill(run, *self.devices(run, 2)), check=True, capture_output=True, timeout=300)
            self.assertEqual(self.student(run), self.student(alone))

    def test_transformers_loads_the_student(self):
        try:
            import numpy
            import torch
            import transformers
        except ImportError as missing:
            self.skipTest(f"{missing}; scripts/setup.sh installs what is missing")
        said = json.loads(self.run_it("run", "--json", "--train.validation_batches", "1").splitlines()[-1])
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "run" / "student",
                                                                  dtype=torch.float32)
        self.assertEqual((model.config.intermediate_size, model.config.num_attention_heads,
                          model.config.num_key_value_heads, model.config.head_dim), (128, 2, 1, 24))
        # The windows of validation_batches = 1: four of those of the last tenth, spread evenly.
        text = numpy.frombuffer(self.corpus.read_bytes(), numpy.uint8).astype(numpy.int64)
        self.assertTrue(math.isfinite(said["distilled_loss"]) and said["distilled_loss"] < said["untrained_loss"])
        with torch.no_grad():
            tokens = torch.from_numpy(text[:33])[None]
            logits = model(tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()
        self.assertLess(abs(loss - said["distilled_loss"]), 1)

        # In 4 bits: what transformers loads is what the packed codes say.
        said = json.loads(self.run_it("int4", "--json", layers=("--student.quantise", "int4,group=32")).splitlines()[-1])
        self.assertLess(said["distilled_loss"], said["untrained_loss"])
        from safetensors.numpy import load_file
        whole = load_file(self.folder / "int4" / "student" / "model.safetensors")
        packed = load_file(self.folder / "int4" / "student-int4" / "model.safetensors")
        matrices = [name for name in whole if name + "_packed" in packed]
        self.assertEqual(len(matrices), 4 * 7)
        for name in matrices:
            words, scales = packed[name + "_packed"].view(numpy.uint32), packed[name + "_scale"]
            codes = (words[:, :, None] >> numpy.arange(0, 32, 4, dtype=numpy.uint32) & 15).astype(numpy.float32) - 8
            weights = codes.reshape(scales.shape[0], scales.shape[1], 32) * scales[:, :, None]
            self.assertEqual(packed[name + "_shape"].tolist(), list(whole[name].shape))
            self.assertTrue((weights.reshape(whole[name].shape) == whole[name]).all(), name)
        others = {name for name in packed if "proj" not in name}
        self.assertEqual(others, set(whole) - set(matrices))
        self.assertTrue(all((packed[name] == whole[name]).all() for name in others))
        config = json.loads((self.folder / "int4" / "student-int4" / "config.json").read_text())
        self.assertEqual(config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"], 32)
        student = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "int4" / "student", dtype=torch.float32)
        with torch.no_grad():
            logits = student(tokens[:, :-1]).logits
        self.assertTrue(torch.isfinite(logits).all())
        try:
            import compressed_tensors  # noqa: F401
        except ImportError:
            return
        loaded = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "int4" / "student-int4",
                                                                   dtype=torch.float32)
        with torch.no_grad():
            self.assertTrue(torch.equal(loaded(tokens[:, :-1]).logits, logits))

    def test_wrong_options_say_what_to_do(self):
        for layers, text in (((), "none of student.from, student.prune"),
                             (("--student.quantise", "int8"), "int4,group=64"),
                             (("--student.prune", "ffn=2"), "at most 1"),
                             (("--student.prune", "ffn=0.5", "--distill.inputs", "nobody"), "distill.inputs")):
            done = subprocess.run(self.distill("wrong", layers=layers), capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(text, done.stderr)
        said = self.run_it("groups", layers=("--student.quantise", "int4"), code=1)
        self.assertIn("which groups of 128 do not divide", said)
        self.run_it("changed", "--train.validation_batches", "1")
        self.assertIn("train.lr", self.run_it("other", "--train.lr", "1e30", code=1))
        said = self.run_it("changed", "--distill.loss", "cosine", code=1)
        self.assertIn("distill.loss is not what the run", said)

    def test_ranks_are_planned_by_measured_times(self):
        self.run_it("measured")
        plan = json.loads(subprocess.run([SMARTINF, "plan", "distill", str(self.folder / "measured"), "--ranks", "3",
                                          "--json"], check=True, capture_output=True, text=True).stdout)
        self.assertEqual(plan["stages"][0]["first"], 0)
        self.assertEqual(plan["stages"][-1]["end"], 4)
        self.assertLess(plan["step_s"], plan["alone_s"])
        # The command divides so.
        said = self.run_stages("planned", str(self.folder / "measured"), world=3)
        rank = 0
        for stage in plan["stages"]:
            of = f"rank {rank}" + (f" to {rank + stage['ranks'] - 1}" if stage["ranks"] > 1 else "")
            self.assertIn(f"{of}: layers {stage['first'] + 1} to {stage['end']}", said)
            rank += stage["ranks"]
        self.assertEqual(self.student("planned"), self.student("measured"))
        for stages, text in (("4x3", "Set train.accumulation = 3"), ("2x2,1", "there are 4 layers and 3 ranks")):
            self.assertIn(text, self.run_stages("refused", stages, world=3, code=1))

    def test_memory_is_that_of_one_layer(self):
        def deeper(out, layers):  # the teacher's first layer so many times
            folder = self.folder / out
            folder.mkdir()
            config = json.loads((self.folder / "wide" / "config.json").read_text())
            config["num_hidden_layers"] = layers
            (folder / "config.json").write_text(json.dumps(config))
            data = (self.folder / "wide" / "model.safetensors").read_bytes()
            size = int.from_bytes(data[:8], "little")
            tensors, header, parts, at = json.loads(data[8:8 + size]), {}, [], 0
            for name, tensor in tensors.items():
                if name == "__metadata__":
                    continue
                begin, end = tensor["data_offsets"]
                of_layer = name.startswith("model.layers.")
                for layer in range(layers if of_layer else 1):
                    here = name.replace("layers.0.", f"layers.{layer}.") if of_layer else name
                    header[here] = {**tensor, "data_offsets": [at, at + end - begin]}
                    parts.append(data[8 + size + begin:8 + size + end])
                    at += end - begin
            text = json.dumps(header).encode()
            (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
            return folder
        self.train(self.recipe(steps=1, precision="f32"), "wide_run", "--model.layers", "1", "--model.width", "384",
                   "--model.mlp_width", "1536")
        self.export("wide_run", "wide")
        flags = ["--train.steps", "4"]
        peaks, memory = {}, None
        for layers in (3, 12):
            teacher = ["--teacher.from", str(deeper(f"deep_{layers}", layers))]
            if memory is None:
                said = self.run_it("small", *flags, *teacher, "--memory.host", "50MiB", code=1)
                memory = math.ceil(float(re.search(r"needs ([\d.]+) MiB of memory", said).group(1))) + 8  # resident pages of libraries vary
            said = self.run_it(f"run_{layers}", *flags, *teacher, "--memory.host", f"{memory}MiB")
            peaks[layers] = float(re.search(r"at most ([\d.]+) MiB of this process", said).group(1))
        layer_mib = 4 * (4 * 384 ** 2 + 3 * 384 * 1536) / 2 ** 20  # of the teacher's; nine more are in the second run
        print(f"at most {peaks} MiB by layers, where {memory} may be used; a layer of the teacher has {layer_mib:.0f}")
        self.assertLessEqual(max(peaks.values()), memory)
        self.assertLess(peaks[12] - peaks[3], layer_mib)


if __name__ == "__main__":
    unittest.main()
