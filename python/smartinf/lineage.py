"""Which state this is: what the devices keep beside it, and what a state dict refers to.

run:     made once per initialization
branch:  made anew by the first step after a checkpoint was loaded, so that two continuations of one
         checkpoint are never taken for each other
updates: steps of this optimizer
steps:   for each parameter how many updates it took part in (torch's state["step"])
"""

import base64
import json
import uuid
import zlib

from smartinf.errors import CorruptError

_RUNS_PLAIN = 500  # a store keeps 64 KiB of this with a step


class Lineage:
    def __init__(self, params, run=None, branch=None, updates=0, steps=None, branch_next=""):
        self.run = run or uuid.uuid4().hex
        self.branch = branch or self.run
        self.updates, self.steps = updates, steps or [0] * params
        self.branch_next = branch_next  # the branch that the next step begins

    def identity(self):
        return {"run": self.run, "branch": self.branch, "updates": self.updates}

    def continued(self, params, same):
        """The lineage of a copy of this state among `params` parameters, none of them stepped yet: its next
        step begins a branch. same(value): the first rank's, on all ranks."""
        return Lineage(params, **self.identity(), branch_next=same(uuid.uuid4().hex))

    def advanced(self, taking_part):
        """The lineage after an update of the parameters in `taking_part` (a list of bool)."""
        steps = [s + int(t) for s, t in zip(self.steps, taking_part, strict=True)]
        return Lineage(len(steps), self.run, self.branch_next or self.branch, self.updates + 1, steps)

    def to_json(self):
        runs = []  # [how many, step]: nearly always one entry, and a client metadata is small
        for step in self.steps:
            if runs and runs[-1][1] == step:
                runs[-1][0] += 1
            else:
                runs.append([1, step])
        if len(runs) > _RUNS_PLAIN:  # many experts, each with a count of its own
            packed = zlib.compress(json.dumps(runs, separators=(",", ":")).encode(), 9)
            runs = base64.b64encode(packed).decode()
        return json.dumps(
            {**self.identity(), "branch_next": self.branch_next, "steps": runs},
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text, params, where):
        lineage = Lineage.__new__(Lineage)
        try:
            given = json.loads(text)
            lineage.run = str(given["run"])
            lineage.branch = str(given["branch"])
            lineage.updates = int(given["updates"])
            lineage.branch_next = given["branch_next"]
            if not isinstance(lineage.branch_next, str):  # true or false, until version 0.1
                lineage.branch_next = uuid.uuid4().hex if lineage.branch_next else ""
            runs = given["steps"]
            if isinstance(runs, str):
                runs = json.loads(zlib.decompress(base64.b64decode(runs)))
            counted = sum(count for count, _ in runs)
            lineage.steps = []
            if counted == params:
                lineage.steps = [step for count, step in runs for _ in range(count)]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, zlib.error) as error:
            raise CorruptError(
                f"{where} holds state that was not written by this package ({error}). State of "
                "`smartinf train` is continued with that command."
            ) from error
        if lineage.updates < 0 or any(type(step) is not int or step < 0 for step in lineage.steps):
            raise CorruptError(f"{where} holds a negative number of steps")
        if len(lineage.steps) != params:
            raise CorruptError(f"{where} counts steps of {counted} parameters, not {params}")
        return lineage
