"""Start-up and figures of the interpreter in a sandbox. This module runs in the sandbox, not in the server."""

import base64
import os
import sys

_FIGURES = "antiphon_figures"


def start(folder: str) -> None:
    """Set the working directory, and write errors to the standard output, so that the order of both is kept."""
    os.environ["MPLBACKEND"] = f"module://{_FIGURES}"
    os.environ["MPLCONFIGDIR"] = "/tmp"
    os.chdir(folder)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.stderr = sys.stdout


def list_figures(limit: int, max_bytes: int) -> None:
    """Write the number of figures and then their images to the standard output, one line each, and close them."""
    captured: list[bytes] = []
    if "matplotlib.pyplot" in sys.modules:
        figures = __import__(_FIGURES)
        figures.capture()
        captured = figures.take()
    lines = [str(len(captured))]
    for image in captured[:limit]:
        max_bytes -= len(image)
        if max_bytes < 0:
            break
        lines.append(base64.b64encode(image).decode())
    sys.stdout.flush()
    data = ("\n".join(lines) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]
