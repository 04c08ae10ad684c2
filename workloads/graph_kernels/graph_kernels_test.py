"""Results beside networkx's, and what the accelerator's counters must say. Argument: PATH/TO/smartinf-graph.

77 (skipped) without networkx.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

try:
    import networkx
    from networkx.algorithms.link_analysis import pagerank_alg
except ImportError:
    print("there is no networkx: pip install networkx")
    sys.exit(77)

PROGRAM = sys.argv.pop()


def run(*words):
    return subprocess.run([PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)


def values(*words):
    done = run("run", *words)
    assert done.returncode == 0, done.stderr
    return {int(vertex): value for vertex, value in (line.split() for line in done.stdout.splitlines())}


def simulated(*words):
    done = run("simulate", "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def length(source, target):
    """edge_length of algorithms.h."""
    return 1 + ((((source << 32 | target) * 0x9E3779B97F4A7C15) & (1 << 64) - 1) >> 40) % 255


class BesideNetworkx(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        draw = random.Random(5)
        cls.vertices = 700
        # Skewed, with vertices that have no edges, loops, and parts that are not connected.
        pairs = {(int(680 * draw.random() ** 3), int(680 * draw.random() ** 2)) for _ in range(2000)}
        cls.graph = networkx.DiGraph()
        cls.graph.add_nodes_from(range(cls.vertices))
        cls.graph.add_edges_from(pairs)
        cls.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(cls.folder.name, "edges.txt")
        path.write_text("# from to\n" + "".join(f"{a} {b}\n" for a, b in sorted(pairs)))
        cls.words = ["--edges-file", path, "--vertices", cls.vertices]
        cls.source = max(cls.graph, key=cls.graph.out_degree)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_pagerank(self):
        ranks = values(*self.words, "--algorithm", "pagerank", "--iterations", 200)
        # networkx.pagerank itself needs scipy.
        expected = pagerank_alg._pagerank_python(self.graph, alpha=0.85, tol=1e-14, max_iter=1000)
        for vertex, rank in expected.items():
            self.assertAlmostEqual(float(ranks[vertex]), rank, delta=1e-10)

    def test_breadth_first_search(self):
        expected = networkx.single_source_shortest_path_length(self.graph, self.source)
        self.assertLess(len(expected), self.vertices)
        self.assertEqual(values(*self.words, "--algorithm", "bfs", "--source", self.source),
                         {vertex: str(expected.get(vertex, "-")) for vertex in self.graph})

    def test_components(self):
        expected = {vertex: str(min(part)) for part in networkx.weakly_connected_components(self.graph)
                    for vertex in part}
        self.assertGreater(len(set(expected.values())), 2)
        self.assertEqual(values(*self.words, "--algorithm", "components"), expected)

    def test_shortest_paths(self):
        expected = networkx.single_source_dijkstra_path_length(
            self.graph, self.source, weight=lambda source, target, _: length(source, target))
        self.assertEqual(values(*self.words, "--algorithm", "sssp", "--source", self.source),
                         {vertex: str(expected.get(vertex, "-")) for vertex in self.graph})


class Accelerator(unittest.TestCase):
    def test_a_gain_has_its_share_of_used_bytes(self):
        for algorithm in ("pagerank", "bfs", "components", "sssp"):
            row = simulated("--algorithm", algorithm, "--stand-in", "pokec", "--scale-down", 128)
            self.assertEqual(row["plain_accesses"], row["in_bank_accesses"])
            self.assertGreater(row["speedup"], 1.1, algorithm)
            self.assertGreater(row["in_bank_used_share"], 1.05 * row["plain_used_share"], algorithm)
            self.assertLess(row["in_bank_accesses_total"], 1, algorithm)
            self.assertEqual(row["plain_accesses_read_data_buffer"], 0)
            # Two bursts of offsets for each gather, and with words for each scatter.
            self.assertGreaterEqual(row["in_bank_accesses_write_buffers"], 1.999 * row["in_bank_accesses_read_data_buffer"])
            self.assertAlmostEqual(row["energy_saved"], 1 - row["in_bank_joules"] / row["plain_joules"])
            for kind in ("plain", "in_bank"):
                shares = [row[f"{kind}_{use}_energy_share"] for use in
                          ("activates", "reads", "writes", "in_bank", "buffers", "refreshes", "standby")]
                self.assertAlmostEqual(sum(shares), 1)
            self.assertEqual(row["plain_in_bank_energy_share"] + row["plain_buffers_energy_share"], 0)

    def test_pageranks_rows_are_near_the_papers(self):
        # The smallest stand-in of fit.py, whose bars are a fifth and 0.08.
        row = simulated("--stand-in", "pokec", "--scale-down", 64, "--iterations", 1)
        self.assertAlmostEqual(row["speedup"], 2.6, delta=0.2 * 2.6)
        self.assertAlmostEqual(row["in_bank_accesses_total"], 0.40, delta=0.08)

    def test_a_cache_that_holds_all_leaves_nothing_to_gain(self):
        row = simulated("--vertices", 10_000, "--edges", 200_000, "--cache-bytes", 1 << 20, "--iterations", 1)
        # Each value comes once, with its neighbours; ranks are streamed.
        self.assertLessEqual(row["plain_misses"], 10_000 / 8)
        self.assertGreater(row["in_bank_misses"], row["plain_misses"])
        self.assertLessEqual(row["in_bank_misses"], 10_000)
        self.assertAlmostEqual(row["speedup"], 1, delta=0.15)

    def test_edges_of_a_block_stay_in_the_cache(self):
        words = ["--graph", "blocks", "--vertices", 200_000, "--edges", 1_000_000, "--cache-bytes", 1 << 18]
        near = simulated(*words, "--inside", 0.95, "--blocks", 500)
        far = simulated(*words, "--inside", 0)
        self.assertLess(3 * near["plain_misses"], far["plain_misses"])

    def test_wrong_input_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "edges.txt")
            for text, says in (("0 1\n1 7\n", "edge 1 (1 to 7) names vertex 7, but there are 5"),
                               ("0 1\n1\n", "line 2 has no edge"), ("0 1 3\n", "more than two numbers"),
                               ("0 -1\n", "line 1 has no edge")):
                path.write_text(text)
                done = run("run", "--edges-file", path, "--vertices", 5)
                self.assertEqual(done.returncode, 2, done)
                self.assertIn(says, done.stderr)
        for words, says in ((["run", "--source", 100_000], "there are 100000 vertices"),
                            (["simulate", "--memory", "ddr5"], "unknown memory"),
                            (["run", "--algorithm", "bsf"], "bfs")):
            done = run(*words)
            self.assertEqual(done.returncode, 2, done)
            self.assertIn(says, done.stderr)


if __name__ == "__main__":
    unittest.main()
