"""make demo-trainer: the example trainer against a real `holdfast dev`, with both killed on the way, and the books checked.

It starts the service and the trainer as processes of their own. The trainer dies twice between receiving and
acknowledging: in step 1 before what it trained is in its checkpoint, in step 2 after. The service, Postgres
and Temporal with it, gets SIGKILL in step 3 while sessions are under way, and is started again on the same data.
In the end what the service released, what arrived and what the steps trained are compared id by id. The last
line is JSON; the exit status is 1 if anything does not add up. Ctrl-C stops everything.
"""

import argparse
import ctypes
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "api/python"))

import holdfast  # noqa: E402
import trainer  # noqa: E402
from holdfast import _calls  # noqa: E402
from trainer_tasks import GROUP_SIZE  # noqa: E402

BOUND = trainer.CONTRACT.staleness_bound
DIES_BEFORE_SAVE, DIES_AFTER_SAVE, SERVICE_DIES = 1, 2, 3  # in which step
SESSIONS_TO_KILL = 8
LIMIT_SECONDS = 600.0  # of any one wait
ENDING_SECONDS = 60.0


class Mortal(trainer.Trainer):
    """The trainer with a journal of what it received, and with a crash where it is wanted."""

    def __init__(self, client, directory, name, dies):
        self.journal = (Path(directory) / "received.jsonl").open("a")
        self.dies = dies
        super().__init__(client, directory, name)

    def next_group(self):
        group = super().next_group()
        self.journal.write(json.dumps([sample.id for sample in group.samples]) + "\n")
        self.journal.flush()
        return group

    def save(self):
        step = len(self.state["steps"]) - 1
        if self.dies == "before-save" and step == DIES_BEFORE_SAVE:
            self.crash("trained on what it received, and has nothing of it on disk")
        super().save()
        if self.dies == "after-save" and step == DIES_AFTER_SAVE:
            self.crash("has it in its checkpoint, and did not acknowledge it")

    def crash(self, where):
        self.say(f"DIES in step {len(self.state['steps']) - 1}: {where}")
        os.kill(os.getpid(), signal.SIGKILL)


LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def with_parent():
    """In a child before it begins: a parent that is killed takes it along."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(command, **options):
    """A child that the terminal's Ctrl-C does not reach: this process ends it."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=with_parent, text=True, **options)


class Service:
    """`holdfast dev` on a port that it keeps over a crash."""

    def __init__(self, binary, directory):
        self.directory, self.binary, self.listen, self.process = directory, binary, f"127.0.0.1:{lasting_port()}", None
        self.log = (directory / "holdfast.log").open("w")

    def start(self):
        environment = {**os.environ, "HOLDFAST_TEMPORAL_BIN": os.environ.get("HOLDFAST_TEMPORAL_BIN", str(ROOT / "bin/holdfast-temporal"))}
        command = [self.binary, "dev", "--listen", self.listen, "--data-dir", self.directory / "service", "--engines", "2",
                   "--time-scale", "20", "--lease-ttl", "4s", "--log-level", "warn"]
        self.process = start(command, env=environment, stdout=subprocess.PIPE, stderr=self.log)
        lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, lines), daemon=True).start()
        self.url = lines.get(timeout=LIMIT_SECONDS)
        if self.url is None:
            raise RuntimeError(f"holdfast dev ended before it served; see {self.log.name}")

    def _read(self, process, lines):
        with process.stdout as output:
            for line in output:
                print(f"  service {process.pid}: {line}", end="", flush=True)
                if line.startswith("API: "):
                    lines.put(line.split()[1])
        lines.put(None)

    def crash(self):
        """SIGKILL for the process and everything below it at once."""
        for pid in descendants(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(timeout=ENDING_SECONDS)

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                self.crash()


def lasting_port():
    """A free port that the system gives to nobody of itself, so that it is still free after a crash."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, lowest if lowest > 11_000 else 20_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")


def descendants(root):
    """A process and everything below it, from /proc."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


class Demo:
    def __init__(self, binary, directory):
        self.began = time.monotonic()
        self.name = f"demo-trainer-{int(time.time())}"
        for old in directory.glob("demo-trainer-*"):
            shutil.rmtree(old)
        self.directory = directory / self.name
        self.directory.mkdir()
        self.child, self.crashes = None, Counter()
        self.service = Service(binary, directory)

    def stop(self):
        """End what was started, the trainer first."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        self.service.stop()

    def go(self):
        """Everything; returns the figures and what is wrong with them."""
        self.service.start()
        self.client = holdfast.Client(self.service.url, retry=trainer.RETRY)
        for run in self.client.call(_calls.active_runs("default")):
            self.client.open_run(run.id).end()  # of a demo that was stopped
        for update in self.client.weight_updates():
            if update.state not in ("committed", "cancelled"):
                self.client.call(_calls.cancel_weights("default", update.policy_version))
        self.run = self.client.run(self.name, contract=trainer.CONTRACT)
        first = self.client.policy().policy_version
        for dies in ("before-save", "after-save"):
            self.life(dies)
            if self.child.wait(timeout=LIMIT_SECONDS) != -signal.SIGKILL:
                raise RuntimeError(f"the trainer ended with status {self.child.returncode} and should have been killed")
            self.crashes["trainer"] += 1
        self.life("")
        self.wait_for_work_under(first + SERVICE_DIES)
        self.say(f"KILLS the service, with {self.run.backlog().total.active} sessions under way")
        self.service.crash()
        self.crashes["service"] += 1
        self.service.start()
        if self.child.wait(timeout=LIMIT_SECONDS) != 0:
            raise RuntimeError(f"the trainer ended with status {self.child.returncode}")
        return self.books()

    def life(self, dies):
        environment = {**os.environ, "HOLDFAST_URL": self.service.url, "PYTHONPATH": str(ROOT / "api/python")}
        self.child = start([sys.executable, __file__, "--as-trainer", self.name, "--checkpoints", self.directory, "--dies", dies], env=environment)

    def wait_for_work_under(self, version):
        """Until several sessions are under way with new weights."""
        end = time.monotonic() + LIMIT_SECONDS
        while self.client.policy().policy_version < version or self.run.backlog().total.active < SESSIONS_TO_KILL:
            if self.child.poll() is not None:
                raise RuntimeError(f"the trainer ended with status {self.child.returncode} before the service was to be killed")
            if time.monotonic() > end:
                raise RuntimeError(f"too few sessions are under way with weights {version}")
            time.sleep(0.02)

    def say(self, text):
        print(f"demo: {text}", flush=True)

    def books(self):
        """Compare what was released, what arrived and what was trained; returns the figures and what is wrong with them."""
        state = json.loads((self.directory / "checkpoint.json").read_text())
        received = Counter(sample for line in (self.directory / "received.jsonl").read_text().splitlines() for sample in json.loads(line))
        trained = Counter(sample for step in state["steps"] for samples in step["groups"].values() for sample in samples)
        released = {session.id for session in self.run.sessions()}
        groups = list(self.run.groups(consumer="", timeout=0))
        samples = {sample.id: sample for group in groups for sample in group.samples}
        version_of = {sample: step["version"] for step in state["steps"] for ids in step["groups"].values() for sample in ids}
        staleness = [max(samples[one].staleness, version_of[one] - samples[one].min_policy_version) for one in trained if one in samples]
        place = next(one for one in self.run.consumers() if one.consumer == self.run.consumer)
        mixture = self.run.mixture().total
        # The weights know as well: a sample that was trained twice would be twice in this sum.
        tokens = sum(sum(sample.loss_mask) for sample in samples.values())
        figures = {
            "iterations": len(state["steps"]), "groups": len(groups), "samples": len(samples),
            "duplicates_received": sum(received.values()) - len(received),
            "trained_twice": sum(count - 1 for count in trained.values()), "missing": len(released - set(trained)),
            "max_staleness": max(staleness, default=None),
            "policy_versions": self.client.policy().policy_version - state["first_version"],
            "shares": {one.class_name: round(one.completed_share, 4) for one in mixture.classes},
            "rho": {one.class_name: round(one.rho, 4) for one in mixture.classes},
            "tv_pp": round(mixture.tv_rho_pp, 2), "crashes": dict(self.crashes), "seconds": round(time.monotonic() - self.began, 1),
        }
        wrong = {
            "a step is missing": figures["iterations"] != trainer.STEPS or figures["policy_versions"] != trainer.STEPS,
            "what was released did not all come, each once": released != set(samples) or len(groups) * GROUP_SIZE != len(samples),
            "a group is not whole": any(len(group.usable) != GROUP_SIZE for group in groups),
            "what was received is not what was released": set(received) != released,
            "something did not come again after the crashes": figures["duplicates_received"] == 0,
            "something was trained twice": figures["trained_twice"] > 0,
            "something was not trained": figures["missing"] > 0 or set(trained) != released,
            "the weights have seen other tokens than the samples have": state["weights"]["tokens"] != tokens,
            "the staleness is beyond the bound": not staleness or max(staleness) > BOUND,
            "a share is more than 1 pp from rho": any(abs(one.completed_share - one.rho) > 0.01 for one in mixture.classes),
            "something is not acknowledged": place.acknowledged_seq != len(released),
            "a crash is missing": self.crashes != {"trainer": 2, "service": 1},
        }
        self.run.end()
        return figures, [text for text, holds in wrong.items() if holds]


def main():
    parser = argparse.ArgumentParser(description="The example trainer against a service of its own, with crashes.")
    parser.add_argument("--data-dir", type=Path, default=ROOT / ".holdfast/demo-trainer", help="where everything is kept")
    parser.add_argument("--holdfast", type=Path, default=ROOT / "bin/holdfast", help="the binary")
    parser.add_argument("--as-trainer", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoints", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dies", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_trainer:
        with holdfast.Client(retry=trainer.RETRY) as client:
            Mortal(client, options.checkpoints, options.as_trainer, options.dies).loop()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.data_dir.mkdir(parents=True, exist_ok=True)
    demo = Demo(options.holdfast, options.data_dir.resolve())
    try:
        figures, wrong = demo.go()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, queue.Empty, subprocess.TimeoutExpired, holdfast.HoldfastError) as error:
        print(f"demo-trainer: {error!r}; see {demo.service.log.name}", file=sys.stderr)
        return 1
    finally:
        demo.stop()
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    print(json.dumps(figures))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
