"""A trainer's loop: groups of four, a step, new weights, and a checkpoint that survives a crash.

    bin/holdfast dev --time-scale 20            # in one terminal
    PYTHONPATH=api/python python3 api/python/examples/plain_loop.py   # in another; kill it at any time and start it again

A pool serves one active run: end another one first (POST /api/v1/runs/RUN/end).
"""

import json
import sys
from pathlib import Path

import holdfast

checkpoint = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoint.json")
state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "cursor": "", "trained": 0}
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3

with holdfast.Client() as client:
    run = client.run("plain-loop", contract=holdfast.Contract({"agent": 0.5, "rlvr": 0.5}, max_concurrency=64))
    groups = run.groups(after=state["cursor"])
    for step in range(state["step"], steps):
        tasks = [
            holdfast.Task(("agent", "rlvr")[i % 2], [1, 2, 3 + i], {"max_tokens": 64}, id=f"{step}-{i}", group_size=4)
            for i in range(8)
        ]
        batch = run.submit(tasks, key=f"step-{step}")  # the same batch, should this step be repeated
        for _ in range(batch.tasks):
            group = next(groups)
            for sample in group.usable:  # train on token_ids, loss_mask, logprobs and reward
                state["trained"] += sum(sample.loss_mask)
        with run.policy_update(client.policy().policy_version + 1):
            pass  # load the new weights into the engines
        # The cursor becomes durable together with the weights; only then is anything acknowledged.
        state.update(step=step + 1, cursor=groups.cursor)
        checkpoint.write_text(json.dumps(state))
        groups.ack()
        print(step, state["trained"], "tokens trained,", run.mixture().total.tv_released_pp, "pp drift", flush=True)
