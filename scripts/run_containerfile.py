"""Execute deploy/Containerfile without a container engine, and start the server that it installs.

    python scripts/run_containerfile.py [--keep] [--offline]

The steps run in order in a temporary folder, with its paths in place of those of the image. The interpreter of this
script takes the place of the base image, so system packages are not covered. Then the server is started with the
image's environment, command and user, its health check is executed, and it is stopped. Users are changed only if the
script runs as root. It takes one to two minutes, most of it for downloads. With --offline, the packages of this
interpreter take the place of downloaded ones: then it takes some seconds, and the versions of the lock files are not
covered.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("/build", "/opt/antiphon", "/var/lib/antiphon")
STEP_SECONDS = 300
START_SECONDS = 60
PORT = 8484


class Step(NamedTuple):
    name: str
    argument: str


class Failed(Exception):
    """A step of the Containerfile failed."""


def read_steps(path: Path) -> list[Step]:
    """Return the instructions of a Containerfile, each with its argument on one line."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Step(*line.partition(" ")[::2]) for line in lines if line.strip()]


class Image:
    """The result of the steps so far, in the folder `root`."""

    def __init__(self, root: Path, *, is_offline: bool = False) -> None:
        self.root = root
        self.is_offline = is_offline
        self.folder = root
        self.environment: dict[str, str] = {}
        self.command: list[str] = []
        self.health_check: list[str] = []
        self.user = ""

    def translate(self, text: str) -> str:
        """Return a text with the paths of the image replaced by those in the folder."""
        return re.sub("|".join(map(re.escape, FOLDERS)), lambda found: f"{self.root}{found[0]}", text)

    def execute(self, step: Step) -> None:
        handler = getattr(self, f"_execute_{step.name.lower()}", None)
        if handler is None:
            raise Failed(f"the instruction {step.name} is not known to this script")
        handler(step.argument)

    def make_environment(self) -> dict[str, str]:
        """Return the environment of the image's processes."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        inherited = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "LANG", "SSL_"))}
        environment = inherited | {"HOME": str(self.root), "PATH": path}
        for name, value in self.environment.items():
            environment[name] = value.replace("$PATH", path)
        return environment

    def _execute_from(self, argument: str) -> None:
        self.folder, self.environment, self.user = self.root, {}, ""

    def _execute_workdir(self, argument: str) -> None:
        self.folder = Path(self.translate(argument))
        self.folder.mkdir(parents=True, exist_ok=True)

    def _execute_copy(self, argument: str) -> None:
        *sources, target = argument.split()
        if sources[0].startswith("--from="):  # stages share the folder
            return
        destination = self.folder / target
        for name in sources:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, destination, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, destination)

    def _execute_run(self, argument: str) -> None:
        if argument.startswith("useradd "):
            self._add_user(argument)
            return
        if os.geteuid() != 0:
            argument = re.sub(r"--(owner|group) \S+ ?", "", argument)
        command = re.sub(r"(?<![/\w.-])python(?= )", shlex.quote(sys.executable), self.translate(argument))
        self._run(use_installed_packages(command) if self.is_offline else command)
        if self.is_offline and " -m venv " in command:
            self._add_installed_packages()

    def _add_installed_packages(self) -> None:
        """Let the new environment find the packages of this interpreter."""
        (folder,) = (self.root / "opt/antiphon/lib").glob("python*/site-packages")
        (folder / "installed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

    def _add_user(self, argument: str) -> None:
        if os.geteuid() != 0 or shutil.which("useradd") is None:
            print("  skipped: users can be added only by root")
            return
        etc = self.root / "etc"
        etc.mkdir(exist_ok=True)
        for name in ("passwd", "group", "login.defs"):
            shutil.copy(Path("/etc") / name, etc / name)
        self._run(argument.replace("useradd ", f"useradd --prefix {shlex.quote(str(self.root))} ", 1))
        if ":10001:" not in (etc / "passwd").read_text():
            raise Failed("the user was not added")

    def _run(self, command: str) -> None:
        done = subprocess.run(
            ["/bin/sh", "-eu", "-c", command],
            cwd=self.folder,
            env=self.make_environment(),
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
            check=False,
        )
        if done.returncode:
            raise Failed(f"{command}\n{done.stdout}{done.stderr}")

    def _execute_env(self, argument: str) -> None:
        pairs = (pair.partition("=") for pair in shlex.split(self.translate(argument)))
        self.environment |= {name: value for name, _, value in pairs}

    def _execute_user(self, argument: str) -> None:
        self.user = argument.partition(":")[0]

    def _execute_healthcheck(self, argument: str) -> None:
        self.health_check = json.loads(argument.partition("CMD ")[2])

    def _execute_entrypoint(self, argument: str) -> None:
        self.command = json.loads(argument)

    def _execute_cmd(self, argument: str) -> None:
        self.command += json.loads(argument)

    def _execute_volume(self, argument: str) -> None:
        if not Path(self.translate(argument)).is_dir():
            raise Failed(f"the folder {argument} does not exist")

    def _execute_expose(self, argument: str) -> None:
        if argument != str(PORT):
            raise Failed(f"the exposed port {argument} is not {PORT}")

    def _execute_stopsignal(self, argument: str) -> None:
        if argument != "SIGTERM":
            raise Failed(f"the server does not stop gracefully on {argument}")


def use_installed_packages(command: str) -> str:
    """Return a command of pip that downloads nothing. Raises Failed if an option is missing that it replaces."""
    if " pip wheel " in command:
        return command.replace(" pip wheel ", " pip wheel --no-index --no-build-isolation ", 1)
    if "/pip install " in command:
        if " --only-binary :all: " not in command:
            raise Failed("pip install must not compile packages: --only-binary :all: is missing")
        return command.replace(" --only-binary :all: ", " --no-index --no-deps ", 1)
    return command


def try_server(image: Image) -> None:
    """Start the server of the image, execute its health check, and stop it."""
    environment = image.make_environment() | {"ANTIPHON_PORT": str(PORT), "ANTIPHON_API_KEYS": "sk-" + "k" * 40}
    user = int(image.user) if os.geteuid() == 0 and can_run_as(int(image.user), environment) else None
    if user is None:
        print("  the server runs as the user of this script")
    script = image.root / "script.json"
    script.write_text('{"default": "Hello."}')
    program = shutil.which(image.command[0], path=environment["PATH"])
    if program is None:
        raise Failed(f"there is no command {image.command[0]}")
    server = subprocess.Popen(
        [program, *image.command[1:], "--script", str(script)],
        cwd=image.folder,
        env=environment,
        user=user,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until_healthy(image, environment, server)
    except BaseException:
        server.kill()
        print(server.communicate()[1], file=sys.stderr)
        raise
    server.send_signal(signal.SIGTERM)
    errors = server.communicate(timeout=START_SECONDS)[1]
    if server.returncode != 0 or "Traceback" in errors:
        raise Failed(f"the server ended with {server.returncode}: {errors}")


def wait_until_healthy(image: Image, environment: dict[str, str], server: "subprocess.Popen[str]") -> None:
    command = [sys.executable if word == "python" else word for word in image.health_check]
    deadline = time.monotonic() + START_SECONDS
    while True:
        checked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if checked.returncode == 0:
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"the health check failed: {checked.stderr}")
        time.sleep(0.2)


def can_run_as(user: int, environment: dict[str, str]) -> bool:
    """Return True if this user can execute the interpreter."""
    try:
        done = subprocess.run([sys.executable, "-c", ""], user=user, env=environment, cwd="/", check=False)
    except PermissionError:
        return False
    return done.returncode == 0


def measure_megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute deploy/Containerfile without a container engine.")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    parser.add_argument("--offline", action="store_true", help="use the packages of this interpreter")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="containerfile-"))
    folder.chmod(0o755)
    image = Image(folder, is_offline=arguments.offline)
    began = time.monotonic()
    try:
        for step in read_steps(ROOT / "deploy" / "Containerfile"):
            print(f"{step.name} {step.argument}"[:120])
            image.execute(step)
        print("start, health check, stop")
        try_server(image)
        size = measure_megabytes(folder / "opt")
        print(f"ok: {size:.0f} MB in /opt/antiphon, {time.monotonic() - began:.0f} seconds")
    except Failed as error:
        sys.exit(f"failed: {error}")
    finally:
        if arguments.keep:
            print(folder)
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
