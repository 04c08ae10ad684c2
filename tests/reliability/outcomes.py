"""What a trial can come to, and the table of all of them."""
import collections
import dataclasses
import enum


class Outcome(enum.Enum):
    SAME = "same"  # the weights are those of an undisturbed run
    REFUSED = "refused"  # a message, an exit code above 0, and fsck agrees
    UNHARMED = "unharmed"  # there are no weights to compare: an answer in time, and nothing else was touched


class Failure(Exception):
    """Anything else: wrong bits, a hang, a death without a message, disagreement, a lost step."""


@dataclasses.dataclass
class Row:
    outcomes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list = dataclasses.field(default_factory=list)  # (trial's number, text)
    seconds: float = 0  # of all trials, one after the other

    @property
    def trials(self):
        return sum(self.outcomes.values()) + len(self.failures)


def table(rows):
    """rows: name of the scenario -> Row."""
    head = ("what", "trials", *(outcome.value for outcome in Outcome), "failures", "seconds")
    lines = [head]
    for name, row in rows.items():
        lines.append((name, row.trials, *(row.outcomes[outcome] for outcome in Outcome),
                      len(row.failures), f"{row.seconds:.0f}"))
    width = max(len(str(line[0])) for line in lines)
    return "\n".join(f"{line[0]:{width}}" + "".join(f"{cell!s:>10}" for cell in line[1:])
                     for line in lines)
