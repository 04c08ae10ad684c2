"""Files of prompts answered by `smartinf generate --batch`: the tokens of prompts alone, one answer for each line,
whatever is killed in between.

Usage: generate_batch_test.py SMARTINF
"""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

from small_models import COMMON, CONFIGS, make, make_tokenizer
from train_runs import ALL, SMARTINF, StreamCase

ENVIRONMENT = {**os.environ, "SMARTINF_PYTHON": sys.executable}


class GenerateBatch(StreamCase):
    def make_model(self, **keys):
        folder = self.folder / "model"
        make(CONFIGS["llama"].__class__(**dict(COMMON, vocab_size=301, max_position_embeddings=2048, **keys)), folder)
        return folder

    def prompts(self, lines, name="prompts.jsonl"):
        path = self.folder / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    def command(self, model, prompts, *words, out="answers.jsonl"):
        return [SMARTINF, "generate", str(model), "--threads", "1", "--batch", str(prompts), "--out",
                str(self.folder / out), *map(str, words)]

    def run_batch(self, *arguments, code=0, **options):
        done = subprocess.run(self.command(*arguments, **options), capture_output=True, text=True, timeout=300,
                              check=False, env=ENVIRONMENT)
        self.assertEqual(done.returncode, code, done.stdout[-2000:] + done.stderr[-2000:])
        return done.stderr

    def answers(self, out="answers.jsonl"):
        return sorted((self.folder / out).read_bytes().splitlines())

    def by_id(self):
        rows = [json.loads(line) for line in self.answers()]
        return {row.get("custom_id", row.get("id")): row for row in rows}

    def alone(self, model, *words):
        done = subprocess.run([SMARTINF, "generate", str(model), "--threads", "1", "--json", *map(str, words)],
                              capture_output=True, text=True, timeout=300, check=True, env=ENVIRONMENT)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_each_line_is_answered_as_alone(self):
        model = self.make_model()
        fast = make_tokenizer(model, self.corpus)
        chat = {"model": "any", "messages": [{"role": "user", "content": "if"}], "max_tokens": 6}
        request = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat}
        completion = {"custom_id": "t", "method": "POST", "url": "/v1/completions",
                      "body": {"prompt": "def value(", "max_tokens": 12}}
        prompts = self.prompts([
            {"id": "a", "prompt": "def value(index):", "max_tokens": 12},
            {"id": "b", "tokens": [5, 6, 7], "max_tokens": 12},
            {"id": "drawn", "tokens": [5, 6, 7], "max_tokens": 12, "temperature": 1.5, "seed": 4},
            {"id": "own seed", "tokens": [5, 6, 7], "max_tokens": 12, "temperature": 1.5},
            request, completion, "", "{", {"id": "a", "prompt": "again"}, {"prompt": "x", "max_token": 3},
            {"id": "long", "tokens": [1] * 2048}, {"id": "empty", "prompt": ""},
            {**request, "custom_id": "r", "body": {**chat, "messages": [{"role": "user", "content": "refuse"}]}}])
        template = fast.chat_template
        (model / "chat_template.jinja").write_text(
            "{% if messages[0].content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}" + template)
        told = self.run_batch(model, prompts)
        self.assertIn("12 in", told)
        self.assertIn("of which 4 cannot be used", told)
        self.assertRegex(told, r"keys and values: .* for 12 sequences at once, of up to \d+ tokens")
        rows = self.by_id()
        self.assertEqual(len(self.answers()), 12)
        self.assertFalse((self.folder / "answers.jsonl.journal").exists())
        for name, says in ((8, "no JSON"), ("a", "line 1 has the same id"), (10, "unknown field: max_token"),
                           ("long", "knows 2048 positions"), ("empty", "the prompt is empty")):
            errors = [row for line in self.answers() if (row := json.loads(line)).get("id") == name and "error" in row]
            self.assertIn(says, errors[0]["error"], name)
        self.assertIn("not this", rows["r"]["error"]["message"])
        self.assertIsNone(rows["r"]["response"])
        answered = next(row for line in self.answers() if (row := json.loads(line)).get("id") == "a" and "text" in row)
        text = self.alone(model, "--prompt", "def value(index):", "--prompt", "def value(", "--tokens", 12)
        self.assertEqual((answered["tokens"], answered["text"]), (text[0]["tokens"], text[0]["text"]))
        self.assertEqual(rows["t"]["response"]["body"]["choices"][0]["text"], text[1]["text"])
        numbers = ("--prompt-tokens", "5,6,7", "--tokens", 12)
        self.assertEqual(rows["b"]["tokens"], self.alone(model, *numbers)[0]["tokens"])
        drawn = self.alone(model, *numbers, "--temperature", 1.5, "--seed", 4)[0]["tokens"]
        self.assertEqual(rows["drawn"]["tokens"], drawn)
        self.assertNotEqual(rows["own seed"]["tokens"], drawn)
        said = self.alone(model, "--prompt", "if", "--chat", "--tokens", 6)[0]
        body = rows["c"]["response"]["body"]
        self.assertEqual(body["choices"][0]["message"]["content"], said["text"])
        self.assertEqual(body["choices"][0]["finish_reason"], "length")
        self.assertEqual(body["usage"], {"prompt_tokens": len(said["prompt_tokens"]), "completion_tokens": 6,
                                         "total_tokens": len(said["prompt_tokens"]) + 6})

    def long_prompts(self, count=20, tokens=200):
        draw = random.Random(5)
        return self.prompts([{"tokens": [draw.randrange(300) for _ in range(draw.randrange(1, 40))],
                              "max_tokens": draw.randrange(tokens // 4, tokens),
                              "temperature": draw.choice([0, 1])} for _ in range(count)])

    def begin(self, model, prompts, *words, journal_bytes):
        """Starts the command, and returns when its journal has become so long, or it has ended."""
        process = subprocess.Popen(self.command(model, prompts, *words), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, env=ENVIRONMENT)
        journal = pathlib.Path(str(self.folder / "answers.jsonl") + ".journal")
        while process.poll() is None:
            if journal.exists() and journal.stat().st_size >= journal_bytes:
                break
            time.sleep(0.002)
        return process

    def test_a_killed_job_goes_on_with_the_same_bits(self):
        model, prompts = self.make_model(), self.long_prompts()
        self.run_batch(model, prompts, "--sequences", 6, "--keep")
        whole, size = self.answers(), (self.folder / "answers.jsonl.journal").stat().st_size
        draw = random.Random(1)
        for trial in range(10 if ALL else 1):
            (self.folder / "answers.jsonl").unlink()
            (self.folder / "answers.jsonl.journal").unlink(missing_ok=True)
            kills = 0
            for length in sorted(draw.randrange(400, size) for _ in range(2)):
                # How many are computed at once may change from start to start.
                process = self.begin(model, prompts, "--sequences", draw.choice([1, 4, 20]), journal_bytes=length)
                process.kill()
                process.communicate()
                kills += process.returncode == -signal.SIGKILL
            self.assertGreater(kills, 0, trial)
            told = self.run_batch(model, prompts, "--sequences", draw.choice([2, 20]))
            self.assertRegex(told, r"goes on behind \d+, and inside \d+ more")
            self.assertEqual(self.answers(), whole)

    def tuned(self, *names):
        """Folders for --cache on which nothing is measured."""
        for name in names:
            (self.folder / name).mkdir()
            (self.folder / name / "smartinf.tuning").write_text(
                "io_bytes = 1048576\nio_depth = 4\nread_bytes_per_second = 1e9\nwrite_bytes_per_second = 1e9\n")

    def test_a_job_with_a_cache_is_killed_again_and_again(self):
        model, prompts = self.make_model(), self.long_prompts()
        self.run_batch(model, prompts, "--keep")
        answers, journal = self.folder / "answers.jsonl", self.folder / "answers.jsonl.journal"
        whole, size = self.answers(), journal.stat().st_size
        answers.unlink()
        journal.unlink()
        self.tuned("kv1", "kv2")
        words = ("--cache", self.folder / "kv1", "--cache", self.folder / "kv2", "--save-every", "0.01s")
        draw = random.Random(2)
        kills, jobs, wanted = 0, 0, 200 if ALL else 3
        while kills < wanted:
            known = journal.stat().st_size if journal.exists() else 0
            process = self.begin(model, prompts, *words, "--sequences", draw.choice([1, 4, 20]),
                                 journal_bytes=known + draw.randrange(1, size // 6))
            process.kill()
            told = process.communicate()[1].decode()
            kills += process.returncode == -signal.SIGKILL
            if process.returncode == 0:
                jobs += 1
                self.assertEqual(self.answers(), whole, kills)
                answers.unlink()
            else:
                self.assertEqual(process.returncode, -signal.SIGKILL, told)
        self.run_batch(model, prompts, *words)
        self.assertEqual(self.answers(), whole)
        print(f"{kills} kills of {jobs + 1} jobs")

    def test_keys_and_values_on_devices_change_no_answer(self):
        model, prompts = self.make_model(), self.long_prompts(count=8)
        one = ("--cache", self.folder / "kv1", "--cache-format", "q8")
        two = (*one, "--cache", self.folder / "kv2", "--memory", "2GB", "--save-every", "0.02s")
        self.tuned("kv1", "kv2")
        journal = self.folder / "answers.jsonl.journal"
        self.run_batch(model, prompts, "--cache-format", "q8", "--keep")
        whole, size = self.answers(), journal.stat().st_size
        for path in (journal, self.folder / "answers.jsonl"):
            path.unlink()
        process = self.begin(model, prompts, *two, journal_bytes=size // 3)
        process.kill()
        process.communicate()
        self.assertEqual(process.returncode, -signal.SIGKILL)
        for cache in self.folder.glob("kv*/smartinf.cache"):
            with cache.open("r+b") as file:  # the first block, of a sequence that is not answered yet
                for byte in os.pread(file.fileno(), 1, 128 * 1024 + 100):
                    os.pwrite(file.fileno(), bytes([byte ^ 1]), 128 * 1024 + 100)
        told = self.run_batch(model, prompts, *one[:2], code=1)
        self.assertIn("--cache-format is f32 and was q8", told)
        killed = (journal.read_bytes(), (self.folder / "answers.jsonl").read_bytes())
        shutil.copytree(self.folder / "kv1", self.folder / "saved")
        told = self.run_batch(model, prompts, *two)
        self.assertRegex(told, r"goes on behind \d+, and inside \d+ more")
        self.assertNotIn("the job was begun with", told)
        self.assertEqual(self.answers(), whole)
        # One of the two is gone, and then both.
        for words in (one, ("--cache-format", "q8")):
            journal.write_bytes(killed[0])
            (self.folder / "answers.jsonl").write_bytes(killed[1])
            if words is one:
                shutil.copytree(self.folder / "saved", self.folder / "kv1", dirs_exist_ok=True)
            told = self.run_batch(model, prompts, *words)
            self.assertRegex(told, r"goes on behind \d+, and inside \d+ more")
            self.assertRegex(told, "keys and values: in .*; the job was begun with .*kv1, .*kv2")
            self.assertEqual(self.answers(), whole)
        self.assertEqual({path.name for path in self.folder.glob("kv*/*")}, {"smartinf.tuning"})
        told = self.run_batch(model, prompts, *one, "--rated-endurance", "1GB", "--fresh")
        self.assertRegex(told, r"drives: .* read, waited for \d+ % of the time, .* written \([0-9.e-]+ % of their rated life\)")
        self.assertEqual(self.answers(), whole)

    def test_the_plans_command_runs_as_it_is(self):
        model, drive = self.make_model(), self.folder / "a drive"
        drive.mkdir()
        self.prompts([{"id": i, "tokens": [1 + i] * 20} for i in range(5)])
        text = subprocess.run([SMARTINF, "simulate", "--machine", "workstation-gen4", "--print-machine"],
                              capture_output=True, text=True, timeout=60, check=True).stdout
        text = text.replace("'RTX4090'", "'none'").replace("count = 4", "count = 1")
        text = text.replace("on_host_cores = false", "on_host_cores = true").replace("NVMe PCIe Gen4 x4", str(drive))
        (self.folder / "m.toml").write_text(text)
        for place in ("memory", "devices"):
            done = subprocess.run(
                [SMARTINF, "plan", "--generate", str(model), "--machine", str(self.folder / "m.toml"), "--context", "20",
                 "--sequences", "5", "--tokens", "7", "--cache-in", place, "--memory", "2GB", "--json"],
                capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 0, done)
            command = json.loads(done.stdout)["command"]
            self.assertEqual("--cache" in command, place == "devices")
            environment = {**ENVIRONMENT, "PATH": f"{pathlib.Path(SMARTINF).parent}:{os.environ['PATH']}"}
            done = subprocess.run(command, shell=True, cwd=self.folder, capture_output=True, text=True, timeout=300,
                                  check=False, env=environment)
            self.assertEqual(done.returncode, 0, done)
            self.assertEqual([len(row["tokens"]) for row in self.by_id().values()], [7] * 5)
            (self.folder / "answers.jsonl").unlink()

    def state_command(self, *words, code=0):
        done = subprocess.run([SMARTINF, *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout

    def test_prompts_that_begin_alike_are_answered_as_alone(self):
        model, draw = self.make_model(), random.Random(3)
        document = [draw.randrange(300) for _ in range(600)]
        rows = [{"id": i, "tokens": [*document, i, 7, *range(10 * i)], "max_tokens": 300, "temperature": i % 2, "seed": 5}
                for i in range(6)]
        prompts = self.prompts([rows[0], {"id": "other", "tokens": [1, 2], "max_tokens": 30}, *rows[1:]])
        told = self.run_batch(model, prompts, "--keep")
        shared = 5 * 512  # two parts
        self.assertRegex(told, rf"prompts: {shared} of the first \d+ tokens begin several prompts")
        journal = self.folder / "answers.jsonl.journal"
        whole, size = self.answers(), journal.stat().st_size
        for i in (0, 3):
            numbers = ",".join(map(str, rows[i]["tokens"]))
            self.assertEqual(self.by_id()[i]["tokens"], self.alone(
                model, "--prompt-tokens", numbers, "--tokens", 300, "--temperature", i % 2, "--seed", 5)[0]["tokens"])
        kv = self.folder / "kv"
        kv.mkdir()
        (kv / "smartinf.tuning").write_text(
            "io_bytes = 1048576\nio_depth = 4\nread_bytes_per_second = 1e9\nwrite_bytes_per_second = 1e9\n")
        # At once, and one after another, where all of them after the first find the beginning again.
        for sequences in (7, 2):
            for path in (journal, self.folder / "answers.jsonl"):
                path.unlink(missing_ok=True)
            words = ("--cache", kv, "--save-every", "0.002s", "--sequences", sequences)
            process = self.begin(model, prompts, *words, journal_bytes=size // 3)
            process.kill()
            process.communicate()
            self.assertEqual(process.returncode, -signal.SIGKILL)
            self.look_at_saved(kv, begun=journal)
            self.run_batch(model, prompts, *words)
            self.assertEqual(self.answers(), whole)
            self.assertEqual({path.name for path in kv.iterdir()}, {"smartinf.tuning"})

    def look_at_saved(self, kv, begun):
        """What a killed job leaves, as the commands for states show it."""
        told = self.state_command("inspect", kv)
        self.assertRegex(told, r"keys and values +\d+ sequences and 1 beginnings that they share of \d+ tokens")
        self.assertIn("the batch job", told)
        saved = json.loads(self.state_command("inspect", kv, "--json"))["keys_and_values"]
        self.assertEqual((saved["layers"], saved["block_tokens"]), (3, 32))
        self.assertIn(512, [sequence["tokens_max"] for sequence in saved["sequences"]])
        self.assertRegex(self.state_command("fsck", kv), "keys and values: .* checked: sound")
        first = 128 * 1024 + 100  # of the first block
        with (kv / "smartinf.cache").open("r+b") as file:
            byte = os.pread(file.fileno(), 1, first)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), first)
            told = self.state_command("fsck", kv, code=1)
            self.assertRegex(told, r"damaged: keys and values: .*block 0 of sequence \d+ in layer 0")
            self.assertIn("1 blocks damaged; when the job goes on", told)
            os.pwrite(file.fileno(), bytes([byte]), first)
        self.assertRegex(self.state_command("gc", kv), "kept .*keys and values of the batch job .*--caches")
        copy = self.folder / "copy"
        shutil.copytree(kv, copy)
        self.assertRegex(self.state_command("gc", copy, "--caches", "--yes"), "leftover .*keys and values of a batch job")
        self.assertEqual({path.name for path in copy.iterdir()}, {"smartinf.tuning"})
        shutil.rmtree(copy)
        self.assertTrue(begun.exists())

    def test_an_interrupt_saves_and_others_are_refused(self):
        model, prompts = self.make_model(), self.long_prompts(tokens=1000)
        process = self.begin(model, prompts, journal_bytes=2000)
        process.send_signal(signal.SIGSTOP)  # it would be done before the other has started
        told = self.run_batch(model, prompts, code=1)
        self.assertIn("another process writes these answers", told)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        told = process.communicate(timeout=60)[1].decode()
        self.assertEqual(process.returncode, 130, told)
        self.assertIn("the same command goes on from here", told)
        short = self.prompts([{"tokens": [1], "max_tokens": 3}], "short.jsonl")
        told = self.run_batch(model, short, "--seed", 2, "--type", "bf16", code=1)
        for says in ("--seed is 2 and was 1", "--type is bf16 and was f32", "the digest of the prompts is", "--fresh"):
            self.assertIn(says, told)
        self.assertNotIn("weights", told)
        self.run_batch(model, short, "--fresh")
        self.assertEqual(len(self.answers()), 1)
        self.assertIn("there are answers, and no journal", self.run_batch(model, short, code=1))

    def test_wrong_flags_are_named(self):
        short = self.prompts([{"tokens": [1], "max_tokens": 3}])
        for words, says in ((("--batch", short), "there is no file for the answers"),
                            (("--batch", short, "--out", "x", "--prompt", "y"), "given together"),
                            (("--prompt", "x", "--out", "y"), "Add --batch")):
            done = subprocess.run([SMARTINF, "generate", "none", *map(str, words)], capture_output=True, text=True,
                                  timeout=60, check=False)
            self.assertEqual(done.returncode, 2)
            self.assertIn(says, done.stderr)

    def test_memory_that_is_said_to_do_does(self):
        model, prompts = self.make_model(), self.prompts([{"tokens": [1, 2], "max_tokens": 2000}] * 20)
        told = self.run_batch(model, prompts, "--memory", "50MB", "--tokens", 4, code=1)
        enough = int(re.search(r"Allow (\d+)MiB or more", told).group(1))
        self.assertIn("or more", self.run_batch(model, prompts, "--memory", f"{enough - 8}MiB", code=1))
        self.run_batch(model, self.prompts([{"tokens": [1, 2], "max_tokens": 2000}]), "--memory", f"{enough + 8}MiB",
                       "--fresh")


if __name__ == "__main__":
    unittest.main()
