"""smartinf-gnn beside torch in memory, and beside itself: other parts, devices, memory and ranks, and after kills.

Usage: gnn_test.py COMMAND [--ranks]; exits with 77 where there is no torch or numpy. --ranks: it was built with ranks.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

try:
    import numpy
    import torch

    import reference
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

COMMAND = pathlib.Path(sys.argv.pop(1)).resolve()
WITH_RANKS = "--ranks" in sys.argv
sys.argv = [word for word in sys.argv if word != "--ranks"]
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests"))
from rank_processes import Ranks  # noqa: E402


def run(*words, fails=False):
    done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)
    if (done.returncode != 0) != fails:
        raise AssertionError(f"{words}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stderr if fails else done.stdout


class Gnn(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        base = os.environ.get("SMARTINF_TEST_FOLDER")
        cls.temporary = tempfile.TemporaryDirectory(dir=base)
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.graph = cls.folder / "graph"
        tuning = pathlib.Path(base or "", "smartinf.tuning")
        if not tuning.is_file():  # no drive is measured
            (cls.folder / "smartinf.tuning").write_text(
                "io_bytes = 1048576\nio_depth = 4\nread_bytes_per_second = 1e9\nwrite_bytes_per_second = 1e9\n"
            )
        run("import", cls.graph, "--made-of", 1500, "--features", 20, "--classes", 5, "--degree", 7)
        run("partition", cls.graph, "--block", 200, "--method", "stream")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def setUp(self):
        self.used = 0

    def devices(self, count=1):
        self.used += 1
        return [self.folder / f"{self.id().split('.')[-1]}.{self.used}.{i}" for i in range(count)]

    def words(self, command, devices, *more):
        return [command, self.graph, "--hidden", 12, "--json", *more, *(w for d in devices for w in ("--device", d))]

    def train(self, devices, epochs, *more):
        return [json.loads(line) for line in run(*self.words("train", devices, "--epochs", epochs, *more)).splitlines()]

    def test_losses_are_those_of_torch(self):
        epochs = 50 if os.environ.get("SMARTINF_TEST_ALL") else 20
        edges, x, y, split = reference.load_graph(self.graph)
        accuracies = {}
        for model, layers in (("sage", 2), ("gcn", 3), ("residual-sage", 3), ("mlp", 2)):
            with self.subTest(model=model):
                devices = self.devices()
                flags = ("--model", model, "--layers", layers)
                self.assertEqual(self.train(devices, 0, *flags), [])
                parameters = self.folder / f"{model}.safetensors"
                run(*self.words("eval", devices, *flags, "--parameters", parameters))
                network = reference.Network(model, reference.load_parameters(parameters), edges, len(x))
                losses, (*_, accuracy) = reference.train(network, x, y, split, epochs, 0.01)
                rows = self.train(devices, epochs, *flags)
                numpy.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=0, atol=1e-4)
                self.assertLess(losses[-1], 0.9 * losses[0])
                test = json.loads(run(*self.words("eval", devices, *flags)))["test"]
                self.assertAlmostEqual(test, accuracy, delta=0.003)
                accuracies[model] = test
        # Neighbours say more than features here.
        self.assertGreater(accuracies["gcn"], accuracies["mlp"] + 0.1)

    def test_bits_depend_on_nothing_but_the_graph(self):
        for flags in (("--model", "residual-sage", "--layers", 3), ("--model", "gcn", "--layers", 2)):
            whole = [row["loss"] for row in self.train(self.devices(), 6, *flags, "--parts", 1, "--threads", 1)]
            for more, devices in (
                (("--parts", 8, "--keep", 0, "--memory", "400MiB"), self.devices()),
                (("--parts", 3, "--keep", "200KB", "--threads", 3), self.devices(3)),
                (("--parts", 8, "--keep", "71KB"), self.devices()),  # halos of one table
            ):
                rows = self.train(devices, 6, *flags, *more)
                self.assertEqual([row["loss"] for row in rows], whole)
                for row in rows:  # to the byte
                    self.assertEqual(row["up_bytes"], row["planned_up_bytes"])
                    self.assertEqual(row["down_bytes"], row["planned_down_bytes"])
                self.assertGreater(rows[0]["up_bytes"], 0)

    def test_parts_are_as_few_as_fit(self):
        memory = ("--memory", "1200KB")
        (plan,) = map(json.loads, run(*self.words("plan", [], *memory)).splitlines())
        self.assertGreater(plan["parts"], 4)
        said = run(*self.words("plan", [], *memory, "--parts", plan["parts"] - 1), fails=True)
        self.assertIn("half of the memory is 586 KiB", said)

    def test_halos_stay_in_memory_where_tables_do_not_fit(self):
        plans = [json.loads(run(*self.words("plan", [], "--parts", 8, "--keep", keep))) for keep in (0, "71KB")]
        self.assertFalse(any(table["in_memory"] or table["halo_in_memory"] for table in plans[0]["tables"]))
        self.assertEqual([table["name"] for table in plans[1]["tables"] if table["halo_in_memory"]], ["activations.1"])
        self.assertLess(plans[1]["up_bytes"], plans[0]["up_bytes"])
        self.assertEqual(plans[1]["row_bytes"], plans[0]["row_bytes"])

    def test_hops_are_chosen_by_exchanges_as_well(self):
        words = self.words("plan", [], "--layers", 3, "--ranks", 2, "--servers", 2, "--alone", 1, "--within", "1GB", "--between", "1GB")
        for seconds, chosen in ((0, 1), (10, 5)):
            (plan,) = map(json.loads, run(*words, "--exchange", seconds).splitlines())
            self.assertEqual([cost["exchanges"] for cost in plan["preload"]], [5, 4, 3, 2, 1, 0])
            self.assertEqual(plan["chosen"], chosen)

    def test_kills_lose_nothing(self):
        epochs, flags = 40, ("--parts", 3, "--keep", 0)
        whole = {row["epoch"]: row["loss"] for row in self.train(self.devices(), epochs, *flags)}
        draw, devices, seen = random.Random(3), self.devices(2), {}
        for _ in range(int(os.environ.get("SMARTINF_TEST_KILLS", 3))):
            words = list(map(str, [COMMAND, *self.words("train", devices, "--epochs", epochs, *flags)]))
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
                printed = [process.stdout.readline() for _ in range(draw.randint(1, 3))]
                time.sleep(draw.uniform(0, 0.05))
                process.kill()
                printed += process.stdout.read().splitlines(keepends=True)
            for line in printed:
                if not line.endswith("\n"):
                    continue
                row = json.loads(line)
                self.assertEqual(seen.setdefault(row["epoch"], row["loss"]), row["loss"])
        self.assertGreater(len(seen), 2)
        for row in self.train(devices, epochs, *flags):
            self.assertEqual(seen.setdefault(row["epoch"], row["loss"]), row["loss"])
        self.assertEqual({epoch: whole[epoch] for epoch in seen}, seen)
        self.assertIn(epochs, seen)
        with subprocess.Popen([COMMAND, *map(str, self.words("train", devices, "--epochs", 10**6))],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # fmt: skip
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            self.assertIn("smartinf-gnn: interrupted", process.communicate()[1])
            self.assertEqual(process.returncode, 130)

    def ranks(self, count, devices, epochs, *more):
        words = ("eval",) if epochs is None else ("train", "--epochs", epochs)
        return Ranks([*map(str, [COMMAND, *self.words(words[0], devices, *words[1:], "--threads", 1, *more)])], count)

    def train_ranks(self, count, devices, epochs, *more):
        """What rank 0 prints, with its counts as planned."""
        with self.ranks(count, devices, epochs, *more) as ranks:
            if any(codes := ranks.wait()):
                raise AssertionError(f"{codes}: {[ranks.err(rank) for rank in range(count)]}")
            rows = [json.loads(line) for line in ranks.out(0).splitlines()]
        for row in rows:
            for name in ("up_bytes", "down_bytes", "within_bytes", "between_bytes"):
                self.assertEqual(row[name], row[f"planned_{name}"], name)
        return rows

    @unittest.skipUnless(WITH_RANKS, "built without torch")
    def test_bits_are_those_of_one_process_for_all_ranks(self):
        for flags, ways in (
            (("--layers", 3), ((2, 1, 1), (2, 2, 0), (2, 2, 3), (4, 2, 4), (3, 3, 5))),
            (("--model", "gcn"), ((3, 3, 0), (4, 2, 2))),
        ):
            whole = [row["loss"] for row in self.train(self.devices(), 4, *flags)]
            between = []
            for ranks, servers, hops in ways:
                with self.subTest(flags=flags, ranks=ranks, servers=servers, hops=hops):
                    keep = ("--keep", 0, "--parts", 2) if hops % 2 == 0 else ()
                    devices = self.devices(1 + hops % 2)
                    rows = self.train_ranks(ranks, devices, 4, *flags, "--servers", servers, "--preload", hops, *keep)
                    self.assertEqual([row["loss"] for row in rows], whole)
                    self.assertEqual(rows[0]["within_bytes"] == 0, servers == ranks)
                    between.append(rows[0]["between_bytes"])
            if len(between) == 5:
                self.assertGreater(between[1], between[2])  # 0 hops and 3
                self.assertEqual((between[0], between[4]), (0, 0))  # one server, and all hops
        with self.ranks(3, self.devices(), 1, "--servers", 2) as ranks:
            self.assertTrue(all(ranks.wait()))
            self.assertIn("3 ranks on 2 servers", ranks.err(0))

    @unittest.skipUnless(WITH_RANKS, "built without torch")
    def test_servers_train_on_samples(self):
        flags = ("--layers", 3, "--servers", 2, "--sample", 1, "--fanout", 3)
        rows = self.train_ranks(2, devices := self.devices(), 10, *flags)
        self.assertEqual(rows[0]["between_bytes"], 0)
        # On the whole graph, with their parameters.
        file = self.folder / "sampled.safetensors"
        with self.ranks(2, devices, None, *flags, "--parameters", file) as ranks:
            self.assertEqual(ranks.wait(), [0, 0])
            sampled = json.loads(ranks.out(0))
        (there,) = map(json.loads, run(*self.words("eval", self.devices(), "--layers", 3, "--start", file)).splitlines())
        self.assertAlmostEqual(there["test"], sampled["test"], delta=0.1)
        self.assertLess(there["loss"], rows[-2]["loss"])
        self.assertIn("of layers.1.weight", run(*self.words("eval", self.devices(), "--layers", 2, "--start", file), fails=True))
        self.assertLess(rows[-1]["loss"], 0.9 * rows[0]["loss"])
        again = self.train_ranks(4, self.devices(2), 10, *flags, "--keep", 0, "--parts", 2)
        self.assertEqual([row["loss"] for row in again], [row["loss"] for row in rows])
        # As large a sample as there can be is the whole graph, up to the order of sums.
        whole = self.train(self.devices(), 10, "--layers", 3)
        rows = self.train_ranks(2, self.devices(), 10, "--layers", 3, "--servers", 2, "--sample", 5, "--fanout", 1500)
        numpy.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in whole], rtol=1e-5)
        self.assertNotEqual(whole[0]["loss"], again[0]["loss"])

    BATCHES = ("--sample", 2, "--fanout", 1500, "--batches", 3)  # of all neighbours

    def test_batches_are_parts_of_the_epoch(self):
        still = ("--lr", 0)
        (whole,) = self.train(self.devices(), 1, *still)
        (rows,) = self.train(self.devices(), 1, *still, *self.BATCHES)
        for name in ("train", "validation", "test"):
            self.assertEqual(rows[name], whole[name])
        self.assertAlmostEqual(rows["loss"], whole["loss"], delta=1e-6)
        # With three updates an epoch, whatever it is computed in.
        whole = self.train(self.devices(), 5)
        rows = self.train(devices := self.devices(), 5, *self.BATCHES)
        self.assertLess(rows[-1]["loss"], whole[-1]["loss"])
        self.assertEqual(json.loads(run(*self.words("eval", devices, *self.BATCHES)))["epoch"], 5)
        again = self.train(self.devices(2), 5, *self.BATCHES, "--parts", 2, "--keep", 0)
        self.assertEqual([row["loss"] for row in again], [row["loss"] for row in rows])
        (plan,) = map(json.loads, run(*self.words("plan", [], *self.BATCHES, "--parts", 2, "--keep", 0)).splitlines())
        for row in again:
            self.assertEqual(row["up_bytes"], plan["up_bytes"])
            self.assertEqual(row["down_bytes"], plan["down_bytes"])
        for words, said in ((("--batches", 3), "3 batches without samples"), ((*self.BATCHES[:-1], 9), "which has 8 blocks")):
            self.assertIn(said, run(*self.words("plan", [], *words), fails=True))

    def test_kills_between_batches_lose_nothing(self):
        epochs, flags = 20, (*self.BATCHES, "--keep", 0)
        whole = {row["epoch"]: row for row in self.train(self.devices(), epochs, *flags)}
        draw, devices, seen = random.Random(6), self.devices(), {}
        for _ in range(int(os.environ.get("SMARTINF_TEST_KILLS", 4))):
            words = list(map(str, [COMMAND, *self.words("train", devices, "--epochs", epochs, *flags)]))
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
                process.stdout.readline()
                time.sleep(draw.uniform(0, 0.1))
                process.kill()
        for row in self.train(devices, epochs, *flags):
            seen[row["epoch"]] = row
        self.assertIn(epochs, seen)
        for epoch, row in seen.items():
            for name in ("loss", "train", "validation", "test"):
                self.assertEqual(row[name], whole[epoch][name])

    @unittest.skipUnless(WITH_RANKS, "built without torch")
    def test_ranks_compute_batches_together(self):
        for servers, ways in ((1, (2,)), (2, (2, 4))):
            flags = (*self.BATCHES[:-1], 2, "--servers", servers)
            losses = [] if servers > 1 else [[row["loss"] for row in self.train(self.devices(), 3, *flags)]]
            for ranks in ways:
                rows = self.train_ranks(ranks, self.devices(), 3, *flags, *(("--keep", 0) if ranks == 4 else ()))
                self.assertEqual(rows[0]["between_bytes"], 0)
                self.assertEqual(rows[0]["within_bytes"] > 0, ranks > servers)
                losses.append([row["loss"] for row in rows])
            self.assertEqual(losses[0], losses[1])

    @unittest.skipUnless(WITH_RANKS, "built without torch")
    def test_killed_ranks_lose_nothing(self):
        kills, flags = int(os.environ.get("SMARTINF_TEST_KILLS", 2)), ("--servers", 2, "--preload", 2, "--keep", 0)
        epochs = 6 * kills
        whole = {row["epoch"]: row["loss"] for row in self.train(self.devices(), epochs)}
        devices, draw, seen = self.devices(), random.Random(4), {}
        for kill in (i % 2 for i in range(kills)):
            with self.ranks(2, devices, epochs, *flags) as ranks:
                ranks.wait_for(0, "\n")
                time.sleep(draw.uniform(0, 0.05))
                ranks.processes[kill].kill()
                self.assertTrue(all(ranks.wait()))
                self.assertIn(f"rank {kill}", ranks.err(1 - kill))
                seen |= {row["epoch"]: row["loss"] for row in map(json.loads, ranks.out(0).splitlines())}
        self.assertLess(len(seen), epochs)
        seen |= {row["epoch"]: row["loss"] for row in self.train_ranks(2, devices, epochs, *flags)}
        self.assertEqual({epoch: whole[epoch] for epoch in seen}, seen)
        self.assertIn(epochs, seen)

    def test_arrays_and_edges_of_ones_own(self):
        draw = numpy.random.default_rng(1)
        edge_index = draw.integers(0, 50, (2, 120))
        x, y = draw.standard_normal((50, 3)).astype("f4"), draw.integers(-1, 4, 50)
        masks = {f"{name}_mask": draw.random(50) < 0.3 for name in ("train", "val", "test")}
        numpy.savez(self.folder / "own.npz", edge_index=edge_index, x=x, y=y, **masks)
        run("import", self.folder / "npz", "--npz", self.folder / "own.npz")
        (self.folder / "edges.csv").write_text("".join(f"{a},{b}\n" for a, b in edge_index.T))
        numpy.save(self.folder / "x.npy", x.astype("f8"))
        numpy.save(self.folder / "y.npy", y)
        run("import", self.folder / "csv", "--edges", self.folder / "edges.csv", "--features-file", self.folder / "x.npy",
            "--labels-file", self.folder / "y.npy")  # fmt: skip
        wanted = {(a, b) for pair in edge_index.T for a, b in (pair, pair[::-1]) if a != b}
        for name in ("npz", "csv"):
            edges, features, labels, split = reference.load_graph(self.folder / name)
            self.assertEqual({tuple(pair) for pair in edges.T.tolist()}, wanted)
            self.assertEqual(edges.shape[1], len(wanted))
            numpy.testing.assert_array_equal(features.numpy(), x)
            numpy.testing.assert_array_equal(labels.numpy(), y)
        split = numpy.load(self.folder / "npz" / "split.npy")
        only_train = masks["train_mask"] & ~masks["val_mask"] & ~masks["test_mask"]
        self.assertTrue((split[only_train] == 0).all() and (split[masks["test_mask"]] == 2).all())

        numpy.save(self.folder / "long.npy", draw.standard_normal((51, 3)).astype("f4"))
        words = ("import", self.folder / "no", "--edges", self.folder / "edges.csv", "--labels-file", self.folder / "y.npy")
        for more, said in (
            (("--features-file", self.folder / "long.npy"), "50 classes, and the graph has 51 vertices"),
            (("--features-file", self.folder / "long.npy", "--vertices", 50), "51 rows of features, and the graph has 50"),
            (("--features-file", self.folder / "x.npy", "--vertices", 20), "but there are 20"),
            (("--features-file", self.folder / "edges.csv"), "no array of NumPy"),
            ((), "neither features nor classes"),
        ):
            self.assertIn(said, run(*words, *more, fails=True))
        numpy.savez_compressed(self.folder / "packed.npz", x=x)
        self.assertIn("compressed", run("import", self.folder / "no", "--npz", self.folder / "packed.npz", fails=True))
        self.assertFalse((self.folder / "no").exists())

    def test_what_does_not_fit_is_refused(self):
        device = self.devices()
        self.train(device, 1)
        self.assertIn("different model", run(*self.words("train", device, "--model", "gcn"), fails=True))
        self.assertIn("the graph has 8 blocks", run(*self.words("plan", [], "--parts", 9), fails=True))
        self.assertIn("half of the memory is 64.0 KiB", run(*self.words("plan", [], "--memory", "128KiB"), fails=True))
        copy = self.folder / "copy"
        shutil.copytree(self.graph, copy)
        run("partition", copy, "--block", 300)  # blocks decide in what order is summed
        said = run("train", copy, "--hidden", 12, "--device", device[0], fails=True)
        self.assertEqual(said.count("of 1500 vertices"), 2)
        self.assertIn("another", said)
        (copy / "order.npy").unlink()
        self.assertIn("smartinf-gnn partition", run("train", copy, "--device", self.devices()[0], fails=True))
        neighbours = numpy.load(copy / "neighbours.npy")
        neighbours[-1] = 1500
        numpy.save(copy / "neighbours.npy", neighbours)
        self.assertIn("neighbour 1500, but there are 1500 vertices", run("partition", copy, fails=True))


if __name__ == "__main__":
    unittest.main()
