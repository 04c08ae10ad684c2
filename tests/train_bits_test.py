"""The same bits wherever the state lies and whoever updates it; torch's own AdamW beside them."""
import os
import platform
import subprocess
import unittest

from train_runs import ALL, TrainCase


class SameBits(TrainCase):
    def test_devices_subgroups_instruction_sets_and_rings(self):
        recipe = self.recipe(steps=16)
        variants = {
            "one": ([], {}),
            "two": (self.devices("two", 2), {}),
            "three": (self.devices("three", 3) + ["--engine.subgroup_elements", "65536"], {}),
            "small": (["--engine.subgroup_elements", "65536"], {}),
            "threads": (["--engine.ring", "threads"], {}),
            "scalar": ([], {"SMARTINF_FORCE_ISA": "scalar"}),
            "host": (["--optimizer.where", "host"], {}),
            "waiting": (["--optimizer.overlap", "none"], {}),
        }
        for run, (flags, env) in variants.items():
            if run in ("two", "small", "threads") and not ALL:
                continue
            with self.subTest(run):
                self.train(recipe, run, *flags, env=env)
                self.assertEqual(len(self.losses(run)), 16)
                self.assertEqual(self.losses(run), self.losses("one"))
                self.assertEqual(self.master_weights(run), self.master_weights("one", run + "_one"))

    def test_checkpointed_activations_change_nothing(self):
        recipe = self.recipe(steps=10)
        self.train(recipe, "kept")
        self.train(recipe, "recomputed", "--memory.activations", "recompute")
        self.assertEqual(self.losses("kept"), self.losses("recomputed"))


class Overlap(TrainCase):
    def slow_devices(self, run, count):
        """Drives that need longer for an update than the next forward computes."""
        slow = []
        for i in range(count):
            slow += [f"--device.{i}.internal_read", "40MB", f"--device.{i}.internal_write", "40MB"]
        return self.devices(run, count) + slow

    def test_an_update_behind_the_next_forward_changes_nothing(self):
        recipe = self.recipe(steps=8)
        variants = {
            "q4": ["--optimizer.format", "q4", "--optimizer.master", "m24", "--train.clip_norm", "0"],
            "bf16": ["--optimizer.format", "bf16", "--train.clip_norm", "0.5",
                     "--memory.activations", "recompute"],
            "compressed": ["--compress.density", "0.3", "--train.validate_every", "5"],
        }
        for run, flags in variants.items():
            with self.subTest(run):
                late = run + "_late"
                self.train(recipe, run, *flags, *self.devices(run, 1), "--optimizer.overlap", "none")
                slow = self.slow_devices(late, 5 if run == "q4" else 3)
                self.train(recipe, late, *flags, *slow, "--optimizer.overlap", "late")
                self.assertEqual(self.losses(run), self.losses(late))
                self.assertEqual(self.master_weights(run), self.master_weights(late))
                lines = [line for line in self.log(late) if "loss" in line]
                self.assertEqual({line["overlap"] for line in lines[:-1]}, {"late"})
                self.assertEqual(lines[-1]["overlap"], "none", "nothing is computed behind the last step")
                self.assertGreater(sum(line["exposed_s"] for line in lines), 0)


    def test_a_guess_right_or_wrong_changes_nothing(self):
        recipe = self.recipe(steps=10)
        norms = None
        for run, flags in {
            "f32": ["--optimizer.format", "f32"],
            "q4": ["--optimizer.format", "q4", "--optimizer.master", "m24", "--memory.activations", "recompute",
                   "--train.accumulation", "2", "--engine.subgroup_elements", "65536"],
        }.items():
            with self.subTest(run):
                self.train(recipe, run + "_free", *flags, *self.devices(run + "_free", 1),
                           "--train.clip_norm", "0", "--optimizer.overlap", "early")
                norms = sorted(line["gradient_norm"] for line in self.log(run + "_free") if "loss" in line)
                bites = ["--train.clip_norm", str(norms[len(norms) // 2])]  # in about half of the steps
                self.train(recipe, run, *flags, *bites, *self.devices(run, 1), "--optimizer.overlap", "none")
                early = run + "_early"
                self.train(recipe, early, *flags, *bites, *self.slow_devices(early, 3),
                           "--optimizer.overlap", "early")
                self.assertEqual(self.losses(run), self.losses(early))
                self.assertEqual(self.master_weights(run), self.master_weights(early))
                lines = [line for line in self.log(early) if "loss" in line]
                self.assertEqual({line["overlap"] for line in lines}, {"early"})
                self.assertEqual({line["wrong_guess"] for line in lines}, {True, False})
                free = [line for line in self.log(run + "_free") if "loss" in line]
                self.assertEqual({line["wrong_guess"] for line in free}, {False})

    def test_early_is_refused_where_it_cannot_be(self):
        recipe = self.recipe(steps=2)
        done = self.train(recipe, "refused", "--compress.density", "0.3", "--optimizer.overlap", "early", code=1)
        self.assertIn("optimizer.overlap", done)
        self.assertIn("compressed", done)


class BesideTorch(TrainCase):
    # A calm run: where the loss jumps, runs that differ in one last place part for good.
    CALM = ["--train.lr", "3e-4", "--train.warmup_steps", "40"]

    @unittest.skipUnless(ALL, "the parameter groups run the same for 60 steps")
    def test_f32_agrees_with_torch_adamw(self):
        recipe = self.recipe(steps=200, precision="f32")
        self.train(recipe, "device", *self.CALM)
        self.train(recipe, "memory", *self.CALM, "--optimizer.where", "memory")
        self.check_beside_torch("device", "memory", steps=200)

    def test_parameter_groups_are_those_of_torch_adamw(self):
        # torch's AdamW gets each group as one of its param_groups.
        flags = [*self.CALM, "--train.lr_factors", "*.mlp.*=0.5,model.embed_tokens.weight=2",
                 "--train.weight_decays", "model.embed_tokens.weight=0,*.self_attn.*=0.3"]
        recipe = self.recipe(steps=60, precision="f32")
        self.train(recipe, "device", *flags)
        self.train(recipe, "memory", *flags, "--optimizer.where", "memory")
        self.check_beside_torch("device", "memory", steps=60)
        self.train(recipe, "plain", *self.CALM)
        self.assertNotEqual(self.losses("plain"), self.losses("device"))

    def test_bf16_stays_in_a_band_around_torch_adamw(self):
        # A weight whose f32 differs in the last place may round to another bf16 (2^-8 relative), and
        # from there the runs drift apart: hence a band, not equality.
        recipe = self.recipe(steps=60)
        self.train(recipe, "device", *self.CALM)
        self.train(recipe, "memory", *self.CALM, "--optimizer.where", "memory")
        for (step, here), (_, there) in zip(self.losses("device"), self.losses("memory"),
                                            strict=True):
            self.assertLessEqual(abs(here - there), 0.02 * there, f"step {step}")


    def test_the_type_of_compute_is_chosen_once(self):
        recipe, run = self.recipe(steps=2, precision="auto"), self.folder / "a"

        def start(run, *flags, **env):
            done = subprocess.run(self.command(recipe, run, flags), capture_output=True, text=True, timeout=300,
                                  env={**os.environ, **env})
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

        # As torch sees a processor without instructions for bf16.
        without = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        told = start("a", **without)
        if platform.machine() == "x86_64":
            self.assertRegex(told, r"precision: f32, because products make [\d.]+ GFLOP/s in bf16, for which this "
                                   r"processor has no instructions, and [\d.]+ in f32")
            self.assertIn(" f32 on cpu", told)
            kept = (run / "recipe.toml").read_text()
            self.assertRegex(kept, r'precision = "f32" +# this machine')
            self.assertIn('gradient_type = "f32"', kept)
            self.assertIn("precision: bf16, for which", start("given", "--train.precision", "bf16", **without))
        # A run keeps what it began with, wherever it goes on.
        kept = (run / "recipe.toml").read_text()
        told = start("a", "--train.steps", "3")
        self.assertIn("resuming at step 3", told)
        self.assertNotIn("train.precision: ", told)
        self.assertNotIn("because products", told)
        start("bf16", "--train.precision", "bf16")
        told = start("bf16", "--train.steps", "3", **without)
        self.assertIn(" bf16 on cpu", told)
        self.assertNotIn("train.precision: ", told)
        self.assertNotIn("gradient_type", told)

if __name__ == "__main__":
    unittest.main()
