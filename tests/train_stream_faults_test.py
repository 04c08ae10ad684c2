"""Runs with less memory than everything takes, whose drives fail, or whose memory is really limited."""
import contextlib
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest

from train_runs import ALL, STREAMED, StreamCase

sys.path.insert(0, str(pathlib.Path(__file__).parent / "reliability"))
import shim  # noqa: E402

SPOOLED = [*STREAMED, "--train.micro_batch", "4", "--memory.activations", "offload"]
# Of which file, which calls, and how they go wrong from some moment on; a single one would be tried again.
# The state is read for weights and for updates.
FAULTS = (("smartinf.spool", "pwritev2", "EIO"), ("smartinf.spool", "pwritev2", "ENOSPC"),
          ("smartinf.spool", "preadv2", "EIO"), ("smartinf.spool", "preadv2", "flipped"),
          ("smartinf.state", "preadv2", "EIO"), ("smartinf.state", "preadv2", "EIO"),
          ("smartinf.state", "pwritev2", "ENOSPC"))
if not ALL:
    FAULTS = FAULTS[::3]

# Control groups of version 2 and 1: where root may make one, and its limit.
GROUPS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))


def memory_group(bytes_max):
    """The folder of a new control group with so much memory; None where none can be made."""
    for root, limit in GROUPS:
        try:
            folder = pathlib.Path(tempfile.mkdtemp(prefix="smartinf_test_", dir=root))
        except OSError:
            continue
        with contextlib.suppress(OSError):
            if (folder / limit).exists():
                (folder / limit).write_text(str(bytes_max), encoding="ascii")
                return folder
        folder.rmdir()
    return None


class StreamFaults(StreamCase):
    on_drive = True  # files in memory would count as memory of a control group

    def setUp(self):
        super().setUp()
        self.shim = shim.build(self.folder)

    def environment(self, file, **names):
        return {"LD_PRELOAD": self.shim, "RELIABILITY_ROOT": str(self.folder), "RELIABILITY_NAME": file,
                **{f"RELIABILITY_{name.upper()}": value for name, value in names.items()}}

    def calls_of_steps(self, file, steps, flags):
        """How many of each call a run makes."""
        run, count = f"counted_{steps}_{file}", self.folder / f"count_{steps}_{file}"
        self.train(self.recipe(steps=steps), run, *self.even_devices(run, 2), *flags,
                   env=self.environment(file, count=str(count)))
        counts = (line.split() for line in count.read_text().splitlines())
        return {call: int(number) for call, number in counts}

    def test_a_drive_that_fails_is_named_and_the_run_goes_on_from_the_committed_step(self):
        flags = self.host(4, *SPOOLED, devices=2)
        calls = {file: self.calls_of_steps(file, 3, flags) for file in ("smartinf.spool", "smartinf.state")}
        recipe = self.recipe(steps=3 * len(FAULTS))
        self.train(recipe, "whole", *SPOOLED)
        draw = random.Random(os.environ.get("SMARTINF_TEST_SEED", "7"))
        harmed = [*self.even_devices("harmed", 2), *flags]
        committed = 0
        for i, (file, call, how) in enumerate(FAULTS):
            with self.subTest(file=file, call=call, how=how):
                fired = self.folder / f"fired_{i}"
                nth = round(draw.uniform(0.4, 0.9) * calls[file][call])
                told = self.train(recipe, "harmed", *harmed, "--optimizer.overlap", ("late", "none")[i % 2],
                                  code=1, env=self.environment(file, fault=f"{call} {how} -{nth} 12345",
                                                               fired=str(fired)))
                self.assertTrue(fired.exists())
                self.assertRegex(told, f"{self.folder}/harmed_device[01]")
                steps = self.losses("harmed")[-1][0]
                self.assertGreater(steps, committed)
                committed = steps
        self.train(recipe, "harmed", *harmed)
        self.check_same_as("harmed", "whole")

    def test_a_run_that_began_with_all_gradients_in_memory_says_when_they_do_not_fit(self):
        larger = [*STREAMED, "--model.mlp_width", "1536", "--train.lr_floor", "1", "--train.warmup_steps", "1"]
        self.train(self.recipe(steps=2), "run", *larger)
        told = self.train(self.recipe(steps=4), "run", *self.host(2, *larger), code=1)
        self.assertRegex(told, "run/state: the device's gradients need .* MiB of memory, and their budget is "
                               ".* MiB; it was made without room for those that do not fit. Allow")
        more = float(re.search(r"Allow (\S+) MiB more .memory.host", told).group(1))
        self.assertEqual(self.losses("run")[-1][0], 2)
        self.train(self.recipe(steps=4), "run", *self.host(8 + round(more), *larger))
        self.train(self.recipe(steps=4), "whole", *larger)
        self.check_same_as("run", "whole")

    def test_a_run_is_not_killed_where_there_is_no_more_memory_than_it_was_told(self):
        flags = self.host(6, *SPOOLED)
        recipe = self.recipe(steps=4)
        group = memory_group(int(flags[-1].removesuffix("MiB")) << 20)
        if group is None:
            self.skipTest("no control group can be made here")
        self.addCleanup(group.rmdir)
        done = subprocess.run(
            ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh",
             *self.command(recipe, "limited", flags)],
            capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])
        self.train(recipe, "whole", *SPOOLED)
        self.check_same_as("limited", "whole")


if __name__ == "__main__":
    unittest.main()
