"""What the example trainer trains on: three classes in the contract's shares, the same tasks for a step every time.

* agent: tool conversations as tau-bench's airline agent had them: lengths of turns and tool results, with the reward.
* rlvr: sums as text, scored by the service (numeric_match).
* rlhf: a chat without a scorer; the trainer's own reward model judges it.
"""

import json
import random
from functools import lru_cache
from pathlib import Path

import holdfast

TRACE = Path(__file__).resolve().parents[3] / "orchestrator/trace/data/tau-bench-airline.jsonl"
RHO = {"agent": 0.486, "rlvr": 0.331, "rlhf": 0.182}
GROUP_SIZE = 4
GROUPS_A_STEP = 9
TOOL_SECONDS = 0.1
MAX_TURNS = 4  # of a conversation, so that a step takes seconds


def tasks(step):
    """The step's tasks; a function of nothing else, so that a repeated submission is the same one."""
    first = step * GROUPS_A_STEP
    kinds = classes(first + GROUPS_A_STEP)[first:]
    return [TASKS[kind](f"{step}-{i}", first + i) for i, kind in enumerate(kinds)]


def classes(count):
    """The classes of the first so many tasks: each time the one that is furthest below its share."""
    so_far, order = dict.fromkeys(RHO, 0), []
    for released in range(count):
        order.append(max(RHO, key=lambda name: RHO[name] * (released + 1) - so_far[name]))
        so_far[order[-1]] += 1
    return order


@lru_cache(maxsize=None)
def conversations():
    lines = TRACE.read_text().splitlines()[1:]
    return [json.loads(line) for line in lines]


def agent(name, number):
    one = conversations()[number % len(conversations())]
    turns = [{"output_tokens": output, "append_tokens": appended, "gap_seconds": TOOL_SECONDS} for output, appended, *_ in one["turns"][:MAX_TURNS]]
    turns[-1].update(append_tokens=0, gap_seconds=0)
    prompt = {"synthetic": {"tokens": one["prompt"], "seed": number, "shared_tokens": one["shared"], "shared_seed": 1}}
    environment = {"kind": "replay", "turns": turns, "reward": one["reward"]}
    return holdfast.Task("agent", prompt, {}, id=name, group_size=GROUP_SIZE, environment=environment, scorer={"kind": "environment"})


def rlvr(name, number):
    rng = random.Random(number)
    a, b = rng.randrange(100), rng.randrange(100)
    prompt, scorer = {"text": f"What is {a} + {b}? Think, then end with the number."}, {"kind": "numeric_match", "target": str(a + b)}
    return holdfast.Task("rlvr", prompt, {"max_tokens": 400}, id=name, group_size=GROUP_SIZE, scorer=scorer)


def rlhf(name, number):
    messages = [{"role": "system", "content": "You are kind and brief."}, {"role": "user", "content": f"Tell me about the number {number}."}]
    return holdfast.Task("rlhf", {"messages": messages}, {"max_tokens": 150}, id=name, group_size=GROUP_SIZE)


TASKS = {"agent": agent, "rlvr": rlvr, "rlhf": rlhf}
