"""The tasks of every agent: call a tool a number of times, then answer with a text.

Uses only the standard library, because the processes of other packages import it.
"""

from typing import NamedTuple

from benchmarks.workloads import make_words

QUESTION = "Look up the figures that you need, one after the other, and summarise them."
OUTPUT = "From the main station: 18:04 from platform 7, 18:19 from platform 2, both on time."
"""Output of the tool. The upstream counts it to find the turn of a run."""


class Task(NamedTuple):
    """A task, with `runs` runs per round. The model has the name of the task.

    A run has one turn per call, and one for the text. An answer arrives in one read per turn. If `paced`, each piece of
    the text arrives in a read of its own.
    """

    name: str
    calls: int
    deltas: int
    runs: int
    paced: bool = False
    streamed: bool = True

    @property
    def pieces(self) -> list[str]:
        return make_words(self.deltas)


FEW_CALLS = Task("few-calls", calls=1, deltas=2, runs=5)
MANY_CALLS = Task("many-calls", calls=9, deltas=2, runs=3)
FEW_CALLS_WHOLE = FEW_CALLS._replace(name="few-calls-whole", streamed=False)
MANY_CALLS_WHOLE = MANY_CALLS._replace(name="many-calls-whole", streamed=False)
FEW_WORDS = Task("few-words", calls=0, deltas=10, runs=8)
MANY_WORDS = Task("many-words", calls=0, deltas=410, runs=4)
FEW_WORDS_PACED = Task("few-words-paced", calls=0, deltas=10, runs=4, paced=True)
MANY_WORDS_PACED = Task("many-words-paced", calls=0, deltas=110, runs=2, paced=True)

TASKS = (
    FEW_CALLS,
    MANY_CALLS,
    FEW_CALLS_WHOLE,
    MANY_CALLS_WHOLE,
    FEW_WORDS,
    MANY_WORDS,
    FEW_WORDS_PACED,
    MANY_WORDS_PACED,
)
