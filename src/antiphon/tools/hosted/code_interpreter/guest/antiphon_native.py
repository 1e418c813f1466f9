"""A Python interpreter for a bubblewrap sandbox. This program runs in the sandbox, not in the server.

It needs only the standard library. Frames on stdin and stdout are a length of four bytes and JSON, whose byte strings
are base64. The first frame has the limits and the files of the container, each further one code. Each is answered.
"""

import ast
import base64
import builtins
import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path

import antiphon_start

_OPEN_FILES = 256


def read_frame(stream):
    head = stream.read(4)
    return json.loads(stream.read(int.from_bytes(head))) if len(head) == 4 else None


def write_frame(stream, message):
    data = json.dumps(message).encode()
    stream.write(len(data).to_bytes(4) + data)
    stream.flush()


class NativeInterpreter:
    """Runs code in one namespace, and finds the files that it changes."""

    def __init__(self, folder, setup):
        self._folder = Path(folder)
        self._namespace = {"__name__": "__main__", "__builtins__": builtins}
        self._max_files = setup["folder_entries"]
        for path, data in setup["files"].items():
            target = self._folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(base64.b64decode(data))
        limit = setup["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
        self._known = self._scan()
        antiphon_start.start(folder)

    def run(self, job):
        logs, is_truncated = self._capture(lambda: self._execute(job["code"]), job["output_bytes"])
        lines, _ = self._capture(
            lambda: antiphon_start.list_figures(job["images"], job["image_bytes"]), job["image_bytes"] * 2 + 1024
        )
        count, *images = lines.split("\n")
        if not count.isdigit():
            count, images, logs = "0", [], logs + lines
        changed, deleted = self._find_changes()
        return {
            "logs": logs,
            "is_truncated": is_truncated,
            "images": [image for image in images if image],
            "figures": int(count),
            "changed": changed,
            "deleted": deleted,
        }

    def _execute(self, code):
        try:
            tree = ast.parse(code, "<code>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec"), self._namespace)
            if last is not None:
                sys.displayhook(eval(compile(ast.Expression(last.value), "<code>", "eval"), self._namespace))
        except SystemExit:
            pass
        except BaseException as error:
            # The first frame is the one of this method.
            error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(error)

    def _capture(self, function, max_bytes):
        """Call a function and return its output. The output goes to a file, because code can write to descriptors."""
        with tempfile.TemporaryFile(dir="/tmp") as target:
            for descriptor in (1, 2):
                os.dup2(target.fileno(), descriptor)
            try:
                function()
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc(file=sys.__stdout__)
            with_rest = target.seek(0) == 0 and target.read(max_bytes + 1)
        return with_rest[:max_bytes].decode(errors="replace"), len(with_rest) > max_bytes

    def _scan(self):
        found = {}
        for parent, folders, names in os.walk(self._folder):
            folders.sort()
            for name in sorted(names):
                path = Path(parent, name)
                if path.is_symlink() or not path.is_file() or not _is_text(str(path)):
                    continue
                status = path.stat()
                found[str(path.relative_to(self._folder))] = (status.st_size, status.st_mtime_ns)
        return dict(list(found.items())[: self._max_files])

    def _find_changes(self):
        current = self._scan()
        changed = {
            path: base64.b64encode((self._folder / path).read_bytes()).decode()
            for path, status in current.items()
            if self._known.get(path) != status
        }
        deleted = [path for path in self._known if path not in current]
        self._known = current
        return changed, deleted


def _is_text(path):
    """Return True if the name is UTF-8. Others cannot be named in a response."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def work():
    stdin, stdout = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    setup = read_frame(stdin)
    if setup is None:
        return
    interpreter = NativeInterpreter(setup["folder"], setup)
    write_frame(stdout, {"ready": True})
    while (job := read_frame(stdin)) is not None:
        write_frame(stdout, interpreter.run(job))


if __name__ == "__main__":
    work()
