"""A matplotlib backend that captures figures as PNG images. This module runs in the sandbox, not in the server."""

import io

import matplotlib.pyplot as plt
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

_captured: list[bytes] = []


class FigureManager(FigureManagerBase):
    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        capture()


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager


def capture() -> None:
    """Render all open figures and close them."""
    for number in plt.get_fignums():
        figure = plt.figure(number)
        if figure.get_axes() or figure.texts or figure.images:
            target = io.BytesIO()
            figure.savefig(target, format="png", bbox_inches="tight")
            _captured.append(target.getvalue())
    plt.close("all")


def take() -> list[bytes]:
    """Return the captured images and forget them."""
    taken = _captured[:]
    _captured.clear()
    return taken
