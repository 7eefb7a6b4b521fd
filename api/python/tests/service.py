"""The real service for the tests: ``holdfast dev`` with simulated engines.

It is started once for a test run, in a directory of its own and on a free port,
with a token for each role, and ended with the process. TEST_HOLDFAST_BIN names the
binary; it is bin/holdfast of this repository by default.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Dict, List, Optional

from holdfast import Client, Contract, RetryPolicy, Run, Task

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "api/python/examples"))

from demo_trainer import lasting_port  # noqa: E402

TOKENS = {role: f"{role}-0123456789abcdef" for role in ("trainer", "operator", "viewer")}
STARTING_SECONDS = 300.0  # of a cold, busy machine
ENDING_SECONDS = 120.0
TIME_SCALE = 50


class Service:
    """A running service with what it has printed."""

    def __init__(self) -> None:
        self.data_dir = new_dir()
        self.output: List[str] = []
        self._start(f"127.0.0.1:{lasting_port()}")

    def _start(self, listen: str) -> None:
        bin_dir = ROOT / "bin"
        env = {**os.environ, "HOLDFAST_TEMPORAL_BIN": os.environ.get("HOLDFAST_TEMPORAL_BIN", str(bin_dir / "holdfast-temporal"))}
        command = [
            os.environ.get("TEST_HOLDFAST_BIN", str(bin_dir / "holdfast")), "dev", "--listen", listen, "--data-dir", self.data_dir,
            "--time-scale", str(TIME_SCALE), "--log-level", "warn",
        ]
        for role, token in TOKENS.items():
            command += ["--token", f"{role}:{token}"]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        address: "queue.Queue[Optional[str]]" = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, address), daemon=True).start()
        try:
            url = address.get(timeout=STARTING_SECONDS)
        except queue.Empty:
            self.stop()
            raise RuntimeError(f"holdfast dev does not serve after {STARTING_SECONDS} s:\n" + "".join(self.output)) from None
        if url is None:
            raise RuntimeError("holdfast dev ended before it served:\n" + "".join(self.output))
        self.url = url

    def _read(self, process: "subprocess.Popen[str]", address: "queue.Queue[Optional[str]]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.output.append(line)
                if line.startswith("API: "):
                    address.put(line.split()[1])
        address.put(None)

    def crash_and_restart(self) -> None:
        """Kill the process as a crash would, and start it again on the same address and data."""
        self.process.kill()
        self.process.wait(timeout=ENDING_SECONDS)
        self._start(self.url.split("//")[1])

    def stop(self) -> None:
        """End the service and all that it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def new_dir() -> str:
    """A directory that every account may enter: Postgres has its own when the tests run as root."""
    path = tempfile.mkdtemp(prefix="holdfast-python-")
    os.chmod(path, 0o755)
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


# A run that is ended from outside ends its service too. unittest takes any other exception for the failure of one test.
signal.signal(signal.SIGTERM, signal.default_int_handler)

_shared: Dict[str, Service] = {}


def shared() -> Service:
    """The service that all tests of a run share."""
    if "service" not in _shared:
        _shared["service"] = Service()
        atexit.register(_shared["service"].stop)
    return _shared["service"]


def client(role: str = "trainer", **options: Any) -> Client:
    """A client of the shared service in one of the roles."""
    options.setdefault("retry", RetryPolicy(deadline_seconds=120))
    return Client(shared().url, TOKENS[role], **options)


_numbers = itertools.count(1)

CONTRACT = Contract({"agent": 0.5, "rlvr": 0.5}, max_concurrency=64)


def new_run(of: Client, pool: str = "default") -> Run:
    """A run of its own on the pool, which serves one at a time: the test ends it."""
    return of.run(f"test-{next(_numbers)}", pool=pool, contract=CONTRACT)


def tasks(count: int, *, group_size: int = 1, max_tokens: int = 24, prefix: str = "t") -> List[Task]:
    """Small tasks of one turn."""
    return [
        Task("rlvr", [1, 2, 3 + i], {"max_tokens": max_tokens}, id=f"{prefix}{i}", group_size=group_size, metadata={"row": i})
        for i in range(count)
    ]
