"""peeraid.py on ten kinds of small images that are made here: files, losses, attacks, all methods, and going on."""

import argparse
import contextlib
import gzip
import io
import json
import pathlib
import struct
import sys
import tempfile
import unittest

try:
    import torch
except ModuleNotFoundError:
    sys.exit(77)
import peeraid
import smartinf
from peeraid import METHODS

torch.set_num_threads(1)
OPTIONS = {"images": 200, "epochs": 3, "batch": 20, "width": 4, "lr": 0.05, "epsilon": 0.1, "attack_steps": 3,
           "detach_targets": False, "temperature": 5.0, "gammas": [1, 0.1], "lambdas": [0, 1, 1],
           "durability": "step", "teacher": None}


def write(path, values):
    header = struct.pack(f">I{values.dim()}I", 0x800 + values.dim(), *values.shape)
    path.write_bytes(gzip.compress(header + bytes(values.flatten().tolist())))


def write_images(folder):
    torch.manual_seed(0)
    kinds = torch.rand(10, 12, 12) * 200
    for part, count in (("train", 200), ("t10k", 50)):
        labels = torch.arange(count) % 10
        images = kinds[labels] + torch.rand(count, 12, 12) * 55
        write(folder / f"{part}-images-idx3-ubyte.gz", images.to(torch.uint8))
        write(folder / f"{part}-labels-idx1-ubyte.gz", labels.to(torch.uint8))


class PeerAiD(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)
        (self.folder / "smartinf.tuning").write_text(
            "io_bytes = 4194304\nio_depth = 8\nread_bytes_per_second = 1e9\nwrite_bytes_per_second = 1e9\n")
        write_images(self.folder)

    def options(self, name, **other):
        places = {"data": self.folder, "device": self.folder / name, "out": self.folder / (name + "-out")}
        return argparse.Namespace(**OPTIONS | places | other)

    def test_files_that_are_no_images(self):
        bad = self.folder / "bad"
        for data, text in ((b"\0\0\x0d\1" + bytes(8), "000008 was expected"),
                           (struct.pack(">II", 0x801, 9) + bytes(8), "has 8 values where its header says")):
            bad.write_bytes(data)
            with self.assertRaisesRegex(ValueError, text):
                peeraid.read_idx(bad)
        with self.assertRaisesRegex(FileNotFoundError, "dataset-fashion-mnist"):
            peeraid.load(self.folder / "nowhere", "train")

    def test_loss_is_the_papers(self):
        """Equations (3) and (4), written out with sums of probabilities, T = 5, gamma 1 and 0.1, lambda 0, 1, 1."""
        student, peer = peeraid.small_resnet(4, 1), peeraid.small_resnet(4, 2)
        x, y = peeraid.load(self.folder, "t10k")
        x, y, noise = x[:8], y[:8], torch.randn(8, 1, 12, 12)
        options = argparse.Namespace(**OPTIONS)
        loss = peeraid.loss_of_step("peeraid", student, peer, x, y, noise, options)
        found = torch.autograd.grad(loss, [*student.parameters(), *peer.parameters()])
        changed = (x + 0.001 * noise).clamp(0, 1)
        for _ in range(3):
            changed.requires_grad_()
            p, s = peer(x).softmax(1).detach(), student(changed).softmax(1)
            (g,) = torch.autograd.grad((p * (p / s).log()).sum(), changed)
            changed = (changed + 0.25 / 3 * g.sign()).detach()
            changed = torch.minimum(torch.maximum(changed, (x - 0.1).clamp(0)), (x + 0.1).clamp(max=1))
        p, s, clean = (z.div(5).softmax(1) for z in (peer(changed), student(changed), student(x)))
        own = -peer(changed).softmax(1)[range(8), y].log().mean() + 0.1 * 25 * (s * (s / p).log()).mean()
        fixed = p.detach()
        expected = own + 25 * (fixed * (fixed / s).log()).mean() + 25 * (clean * (clean / s).log()).mean()
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(
            found, torch.autograd.grad(expected, [*student.parameters(), *peer.parameters()]), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)

    def test_attack_stays_near(self):
        x, y = peeraid.load(self.folder, "t10k")
        model = peeraid.small_resnet(4, 1)
        changed = peeraid.attacked(model, x, y, argparse.Namespace(epsilon=0.1))
        self.assertLessEqual((changed - x).abs().max().item(), 0.1 + 1e-6)
        self.assertTrue(0 <= changed.min().item() and changed.max().item() <= 1)
        loss = torch.nn.functional.cross_entropy
        self.assertGreater(loss(model(changed), y).item(), loss(model(x), y).item())

    def test_all_methods_learn(self):
        x, y = peeraid.load(self.folder, "t10k")
        for method in METHODS:  # PeerAiD's student learns nothing but the peer's opinion, and so later
            epochs = 24 if method == "peeraid" else 6
            out = peeraid.train(method, self.options("all", epochs=epochs, epsilon=0.02, lr=0.1), 0)
            self.assertGreater(peeraid.right(peeraid.network(out / "student.pt"), x, y), 0.5, method)
        self.assertGreater(peeraid.right(peeraid.network(out / "peer.pt"), x, y), 0.5)

    def test_rows_are_kept(self):
        options = self.options("rows", epochs=1, images=20, seeds=[0], test_images=50)
        with contextlib.redirect_stdout(io.StringIO()):
            peeraid.compare(options)
            options.seeds = [0, 1]
            kept = options.out / "rows.jsonl"
            first = kept.read_text().splitlines()
            kept.write_text("".join(line + "\n" for line in first[:-1]))  # as if it had stopped before
            peeraid.compare(options)
        rows = kept.read_text().splitlines()
        self.assertEqual(rows[: len(METHODS)], first)
        self.assertEqual([json.loads(row)["seed"] for row in rows], [0] * len(METHODS) + [1] * len(METHODS))

    def test_a_training_that_stops_goes_on_with_the_same_bits(self):
        out = peeraid.train("peeraid", self.options("whole", epochs=1), 0)
        plain, steps = smartinf.SGD.step, []

        def step(optimizer, *args):
            if len(steps) == 4:
                raise KeyboardInterrupt
            steps.append(plain(optimizer, *args))

        smartinf.SGD.step = step
        try:
            with self.assertRaises(KeyboardInterrupt):
                peeraid.train("peeraid", self.options("cut", epochs=1), 0)
        finally:
            smartinf.SGD.step = plain
        again = peeraid.train("peeraid", self.options("cut", epochs=1), 0)
        for name in ("student.pt", "peer.pt"):
            for mine, theirs in zip(torch.load(out / name).values(), torch.load(again / name).values(), strict=True):
                self.assertTrue(torch.equal(mine, theirs))


if __name__ == "__main__":
    unittest.main()
