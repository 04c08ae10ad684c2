"""The list of scenarios. A trial is a function of a Trial; the order of its draws repeats with the seed."""
import dataclasses
import pathlib
import random
from typing import Callable

SCENARIOS = {}  # name -> Scenario, in the order of the table


@dataclasses.dataclass(frozen=True)
class Scenario:
    name: str
    run: Callable  # (Trial) -> Outcome, or raises Failure
    count: int  # trials of the long form
    short: int  # trials of the short form


@dataclasses.dataclass
class Trial:
    machine: object
    draw: random.Random
    folder: pathlib.Path  # of its own, empty
    index: int  # where a scenario goes through its cases one by one


def scenario(count, short):
    def add(function):
        SCENARIOS[function.__name__] = Scenario(function.__name__, function, count, short)
        return function
    return add
