"""The trace of a run behind emulated links: valid, nested, complete, and counted like the log.

Usage: train_trace_test.py PATH_OF_SMARTINF
"""
import collections
import json
import unittest

from train_runs import TrainCase

STEPS = 4
FLAGS = ["--engine.subgroup_elements", "65536", "--engine.host_link_up", "400MB",
         "--engine.host_link_down", "400MB", "--device.0.internal_read", "300MB",
         "--device.0.internal_write", "200MB", "--device.0.internal_shared",
         "--device.0.bandwidth", "1", "--device.1.bandwidth", "1",
         "--device.0.name", "slow", "--device.1.name", "plain"]
# What a device does, and each emulated link both ways; "plain" has no internal link.
TRACKS = {
    "trainer": {"step"},
    "slow": {"read", "write", "step", "processor 0"},
    "plain": {"read", "write", "step", "processor 0"},
    "slow internal link": {"up", "down"},
    "host link": {"up", "down"},
}


class Trace(TrainCase):
    def events(self, run, *flags):
        path = self.folder / f"{run}.json"
        self.train(self.recipe(STEPS), run, "--trace", str(path), *self.devices(run, 2), *FLAGS,
                   "--device.0.threads", "1", "--device.1.threads", "1", *flags)
        trace = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual(trace["otherData"]["dropped_events"], 0)
        return trace["traceEvents"]

    def log_sum(self, run, way, kind):
        return sum(device[way][kind] for line in self.log(run) if "devices" in line
                   for device in line["devices"])

    def test_every_device_and_link_has_its_tracks(self):
        events = self.events("run")
        groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = collections.defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                self.assertGreaterEqual(event["dur"], 0)
                spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        self.assertEqual(set(spans), set(threads), "tracks without spans are not shown")
        shown = collections.defaultdict(set)
        for (pid, _), name in threads.items():
            # "read 2" holds what overlaps with "read".
            shown[groups[pid]].add(name.rstrip("23456789").rstrip() if not name.startswith("proc") else name)
        self.assertEqual(dict(shown), TRACKS)
        for track, times in spans.items():
            times.sort()
            for (_, end), (begin, _) in zip(times, times[1:]):
                self.assertLessEqual(end, begin + 1e-3, f"spans of {threads[track]} overlap")  # a ns

        # The counters of the host link end at what the log's counters say. Only the weights that are
        # loaded when the run opens are in neither; state is also written before the first step.
        last = {(groups[e["pid"]], e["name"]): e["args"]["bytes"] for e in events if e["ph"] == "C"}
        gradients = self.log_sum("run", "host_down", "gradient")
        self.assertGreater(gradients, 0)
        self.assertEqual(last["host link", "down, gradient bytes"], gradients)
        self.assertEqual(last["host link", "up, weight bytes"], self.log_sum("run", "host_up", "weight"))
        self.assertGreaterEqual(last["slow", "write, state bytes"] + last["plain", "write, state bytes"],
                                self.log_sum("run", "written", "state"))

        steps = [e["args"]["step"] for e in events if e["ph"] == "X" and e["name"] == "commit"]
        self.assertEqual(sorted(steps), sorted(2 * list(range(STEPS + 1))), "each device, step 0 too")

    def test_a_host_update_sends_its_state_over_the_link(self):
        events = self.events("host", "--optimizer.where", "host", "--engine.gradient_budget", "0",
                             "--optimizer.gradient_type", "f32")
        groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        counted = {e["name"] for e in events if e["ph"] == "C" and groups[e["pid"]] == "host link"}
        for counter in ("up, state bytes", "down, state bytes", "up, gradient bytes", "down, gradient bytes"):
            self.assertIn(counter, counted)
        self.assertNotIn("up, weight bytes", counted)
        self.assertEqual(self.log_sum("host", "host_up", "state"), self.log_sum("host", "read", "state"))


if __name__ == "__main__":
    unittest.main()
