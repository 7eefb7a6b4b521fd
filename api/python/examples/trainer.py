"""A trainer that may die at any moment: one step ahead, and every group trained exactly once.

    bin/holdfast dev --time-scale 20                                                   # in one terminal
    PYTHONPATH=api/python python3 api/python/examples/trainer.py /tmp/checkpoints      # in another; kill it, start it again

`make demo-trainer` runs it, kills it and the service, and counts.

* The checkpoint is written in one piece, with the weights and the ids of what they were trained on. It comes
  before the acknowledgement: what was received and is not in it is trained when it comes again, and what is
  in it is passed over.
* A batch is submitted under its step's name, so a repeated step finds the batch that it submitted before.
* The step's batch was released one weight update earlier, while the step before was trained: that is the
  staleness of 1 that the contract allows. The engines work while the trainer does.
"""

import json
import os
import sys
from pathlib import Path

import holdfast
from trainer_tasks import RHO, tasks

STEPS = 6
CONTRACT = holdfast.Contract(RHO, max_concurrency=256, staleness_bound=1)
# A service that was killed is back after some seconds; it is waited for.
RETRY = holdfast.RetryPolicy(deadline_seconds=180, max_delay_seconds=1)


class Trainer:
    def __init__(self, client, directory, name="trainer"):
        self.client = client
        self.run = client.run(name, contract=CONTRACT)
        self.file = Path(directory) / "checkpoint.json"
        first = {"first_version": client.policy().policy_version, "weights": {"value": 0.0, "tokens": 0}, "steps": []}
        self.state = json.loads(self.file.read_text()) if self.file.exists() else first
        self.groups = self.run.groups()  # from the last one acknowledged
        self.inbox = []  # received and not yet acknowledged, in the service's order
        self.say(f"begins at step {len(self.state['steps'])}")

    def loop(self):
        while len(self.state["steps"]) < STEPS:
            step = len(self.state["steps"])
            version = self.update_weights()
            batch = self.run.submit(tasks(step), key=f"step-{step}")
            if step + 1 < STEPS:
                self.run.submit(tasks(step + 1), key=f"step-{step + 1}")  # one step ahead
            groups = self.receive(batch)
            staleness = max((version - sample.min_policy_version for group in groups for sample in group.usable), default=0)
            self.train(groups)
            trained = {group.task: [sample.id for sample in group.usable] for group in groups}
            self.state["steps"].append({"batch": batch.id, "version": version, "staleness": staleness, "groups": trained})
            self.save()
            self.acknowledge()
            self.say(f"step {step} done: {len(groups)} groups at weights {version}, staleness at most {staleness}, "
                     f"{self.state['weights']['tokens']} tokens trained in all, {self.run.mixture().total.tv_rho_pp:.1f} pp from rho")
        self.update_weights()

    def update_weights(self):
        """Put the checkpoint's weights into the engines, unless they have them already."""
        version = self.state["first_version"] + len(self.state["steps"])
        if self.client.policy().policy_version < version:
            with self.run.policy_update(version):
                pass  # here the engines are paused: load self.state["weights"] into them
        return version

    def receive(self, batch):
        """All groups of a batch. Some of the next one may come before the last of them."""
        while True:
            groups = [group for group in self.inbox if group.batch == batch.id]
            if len(groups) == batch.tasks:
                return groups
            self.inbox.append(self.next_group())

    def next_group(self):
        return next(self.groups)

    def train(self, groups):
        """Stands for the step: a group's samples are judged by what is better and worse than its mean."""
        weights = self.state["weights"]
        for group in groups:
            rewards = [self.reward(sample) for sample in group.usable]
            for sample, reward in zip(group.usable, rewards):
                tokens = sum(sample.loss_mask)
                weights["value"] += 0.01 * (reward - sum(rewards) / len(rewards)) * sum(sample.logprobs) / tokens
                weights["tokens"] += tokens

    def reward(self, sample):
        """The scorer's reward; else that of a reward model, for which the variety of the words stands here."""
        generated = [token for token, mine in zip(sample.token_ids, sample.loss_mask) if mine]
        return sample.reward if sample.reward is not None else len(set(generated)) / len(generated)

    def save(self):
        """All of it or nothing, whatever happens in between."""
        new = self.file.with_suffix(".new")
        with new.open("w") as out:
            json.dump(self.state, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, self.file)

    def acknowledge(self):
        """Up to the first group that no step has trained yet."""
        trained = {task for step in self.state["steps"] for task in step["groups"]}
        last = None
        while self.inbox and self.inbox[0].task in trained:
            last = self.inbox.pop(0)
        if last is not None:
            self.groups.ack(last)

    def say(self, text):
        print(f"  trainer {os.getpid()}: {text}", flush=True)


if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
    place.mkdir(parents=True, exist_ok=True)
    with holdfast.Client(retry=RETRY) as connected:
        Trainer(connected, place).loop()
