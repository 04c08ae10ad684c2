"""The collective calls of ranks as processes: what they bring, and who is named when a rank does not take part.

Usage: rank_calls_test.py PATH_OF_RANK_WORKER [unittest's own arguments]
"""
import signal
import sys
import time
import unittest

from rank_processes import Ranks

WORKER = sys.argv.pop(1)
TIMEOUT_S = 3
FOREVER = "1000000"


def started(count, *arguments, timeout_s=TIMEOUT_S, **more):
    return Ranks([WORKER, str(timeout_s * 1000), *arguments], count, **more)


class RankCalls(unittest.TestCase):
    def expect_named(self, ranks, culprit, others, *texts, seconds=2 * TIMEOUT_S + 14):
        """All others end within the time and say which rank it was, and why."""
        began = time.monotonic()
        self.assertEqual(ranks.wait(seconds + 20, others), [1] * len(others))
        self.assertLess(time.monotonic() - began, seconds)
        for rank in others:
            for text in (f"rank {culprit} (process {ranks.processes[culprit].pid} on ", *texts):
                self.assertIn(text, ranks.err(rank), f"rank {rank}")

    def test_every_kind_of_call_brings_what_was_sent_on_every_channel(self):
        for count in (2, 3):
            with started(count, "8") as ranks:
                self.assertEqual(ranks.wait(), [0] * count, [ranks.err(rank) for rank in range(count)])
                for rank in range(count):
                    self.assertIn(f"joined as rank {rank} (process {ranks.processes[rank].pid} on ",
                                  ranks.out(rank))
                    self.assertIn(f"{rank} of {count} here", ranks.out(rank))
                    self.assertTrue(ranks.out(rank).endswith("round 7\ndone\n"))

    def test_a_rank_that_is_killed_is_named_to_all_others(self):
        for culprit in (0, 2):  # rank 0 serves the store
            with started(3, FOREVER, timeout_s=60) as ranks:
                ranks.wait_for(1, "round 3")
                ranks.processes[culprit].kill()
                others = [rank for rank in range(3) if rank != culprit]
                self.expect_named(ranks, culprit, others, "last committed step stands", seconds=20)

    def test_a_rank_that_is_stopped_is_named_within_twice_the_timeout(self):
        for culprit in (0, 1):
            with started(3, FOREVER) as ranks:
                ranks.wait_for(2, "round 3")
                ranks.processes[culprit].send_signal(signal.SIGSTOP)
                others = [rank for rank in range(3) if rank != culprit]
                self.expect_named(ranks, culprit, others)
                if culprit == 1:
                    self.assertIn("it is stopped", ranks.err(0))
                # Once it goes on it learns that the others have given up.
                ranks.processes[culprit].send_signal(signal.SIGCONT)
                self.assertEqual(ranks.wait(30, [culprit]), [1])

    def test_what_a_rank_fails_with_is_what_all_others_fail_with(self):
        for culprit in (0, 2):
            command = lambda rank, culprit=culprit: [WORKER, "60000", FOREVER,
                                                     *(["fail", "3"] if rank == culprit else [])]
            with Ranks(command, 3) as ranks:
                others = [rank for rank in range(3) if rank != culprit]
                self.expect_named(ranks, culprit, others, "the drive is full", "Make room", seconds=20)

    def test_a_rank_that_lives_and_does_not_come_is_named(self):
        command = lambda rank: [WORKER, str(TIMEOUT_S * 1000), FOREVER, *(["sleep", "3"] if rank == 1 else [])]
        with Ranks(command, 3) as ranks:
            ranks.wait_for(0, "round 2")
            self.expect_named(ranks, 1, [0, 2], "lives, but the others have waited")

    def test_of_ranks_that_wait_for_each_other_in_a_chain_the_one_at_its_end_is_named(self):
        with started(3, FOREVER, "chain", "3") as ranks:
            ranks.wait_for(0, "round 2")
            self.expect_named(ranks, 1, [0, 2], "lives, but the others have waited")

    def test_a_rank_that_comes_late_to_where_they_meet_is_waited_for(self):
        command = lambda rank: [WORKER, "1000", "4", "late" if rank == 1 else "meet", "2"]
        with Ranks(command, 3) as ranks:
            self.assertEqual(ranks.wait(60), [0, 0, 0], [ranks.err(rank) for rank in range(3)])

    def test_a_rank_that_dies_before_it_comes_there_is_named(self):
        command = lambda rank: [WORKER, "60000", FOREVER, *(["meet", "2"] if rank != 1 else ["sleep", "2"])]
        with Ranks(command, 3) as ranks:
            ranks.wait_for(1, "round 1")
            time.sleep(0.5)
            ranks.processes[1].kill()
            self.expect_named(ranks, 1, [0, 2], "has ended", seconds=20)

    def test_ranks_that_do_not_come_at_all_are_named_to_all_others(self):
        # Rank 0, whose process has the store, is the first to give up, and the last.
        with Ranks(lambda rank: [WORKER, "2000" if rank == 0 else "60000", "1"], 3) as ranks:
            ranks.processes[2].kill()
            self.assertEqual(ranks.wait(30, [0, 1]), [1, 1])
            for rank in (0, 1):
                self.assertIn("of 3 ranks these did not come", ranks.err(rank))
                self.assertIn(": rank 2.", ranks.err(rank))


if __name__ == "__main__":
    unittest.main()
