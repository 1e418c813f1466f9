"""The work that every agent gets: to call a tool a few times, and to answer with a text.

Nothing here needs more than the standard library: the processes of others read it too.
"""

from typing import NamedTuple

from benchmarks.workloads import say

QUESTION = "Look up the figures that you need, one after the other, and tell what they say."
OUTPUT = "From the main station: 18:04 from platform 7, 18:19 from platform 2, both on time."
"""What the tool gives. The upstream counts it to know how far a run is."""


class Task(NamedTuple):
    """A run of an agent, `runs` times in a round. The model that it is asked of has the task's name.

    It takes a turn for each of its calls, and one for the text. What the model says comes with one read for each turn,
    or, `paced`, with one read for each piece of the text.
    """

    name: str
    calls: int
    deltas: int
    runs: int
    paced: bool = False
    streamed: bool = True

    @property
    def pieces(self) -> list[str]:
        return say(self.deltas)


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
