"""A check that objects are freed without the garbage collector."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def expect_no_garbage() -> Iterator[None]:
    """Fail if the block leaves objects of this package in reference cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("antiphon"))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found
