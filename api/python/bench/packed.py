"""Time to encode and to decode one big sample, packed against JSON, with and without numpy.

    python3 api/python/bench/packed.py [tokens] [repetitions]

Processor time of this process: from arrays of token ids, loss mask and
log-probabilities to the bytes of a page, and from these, as they come off the
socket, back to arrays. Encoding is what a Python program would do; the service's
own is measured by ``go test ./api -run NONE -bench Sample``.
"""

from __future__ import annotations

import binascii
import importlib.util
import json
import os
import platform
import random
import sys
import time
from array import array
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

ROUND = 10
Way = Tuple[str, str, Callable[[], int]]
Arrays = Tuple["array[int]", "array[int]", "array[float]"]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from holdfast.documents import page_of  # noqa: E402


def page(tokens: Dict[str, Any]) -> bytes:
    """A page of one sample, as the service writes it."""
    sample: Dict[str, Any] = {
        "id": "c7fd8ab1-0ae6-4f0c-8d53-f4a3d3cf1c5c", "seq": 1, "cursor": "AAAAAAAAAAEAAAAA", "run": "r", "batch": "b", "task": "t",
        "task_id": "x", "member": 0, "group_size": 4, "class": "agent", "status": "completed",
        "segments": [{"kind": "prompt", "turn": 0, "start": 0, "count": 1000, "policy_version": 4}] * 100, **tokens,
    }
    return json.dumps({"samples": [sample], "next": "n", "more": False}, separators=(",", ":")).encode()


def arrays(count: int) -> Arrays:
    """A sample: a vocabulary of 150,000, half of the tokens generated."""
    rng = random.Random(1)
    ids = [rng.randrange(150_000) for _ in range(count)]
    mask = [rng.randrange(2) for _ in range(count)]
    logprobs = [round(-rng.expovariate(1), 6) if bit else 0 for bit in mask]
    return array("i", ids), array("B", mask), array("f", logprobs)


def encode_packed(sample: Arrays) -> bytes:
    """Little-endian arrays in base64."""
    ids, mask, logprobs = sample
    packed: Dict[str, Any] = {"count": len(ids)}
    for name, values in (("token_ids", ids.tobytes()), ("loss_mask", mask.tobytes()), ("logprobs", logprobs.tobytes())):
        packed[name] = binascii.b2a_base64(values, newline=False).decode()
    return page({"packed": packed})


def encode_json(sample: Arrays) -> bytes:
    """Arrays of numbers; a log-probability as short as its float32 allows, as the service writes it."""
    ids, mask, logprobs = sample
    return page({"tokens": {"token_ids": ids.tolist(), "loss_mask": mask.tolist(), "logprobs": [float(f"{value:.7g}") for value in logprobs]}})


def to_lists(body: bytes) -> int:
    """What a trainer without this package does with encoding=json: lists of numbers."""
    tokens = json.loads(body)["samples"][0]["tokens"]
    return len(tokens["token_ids"]) + len(tokens["loss_mask"]) + len(tokens["logprobs"])


def to_arrays(body: bytes) -> int:
    """Arrays of the standard library."""
    sample = page_of(json.loads(body)).samples[0]
    return len(sample.token_ids) + len(sample.loss_mask) + len(sample.logprobs or ())


def to_numpy(body: bytes) -> int:
    """Arrays of numpy."""
    ids, mask, logprobs = page_of(json.loads(body)).samples[0].numpy()
    return len(ids) + len(mask) + len(() if logprobs is None else logprobs)


def milliseconds(ways: List[Way], repetitions: int) -> List[List[float]]:
    """Sorted times of each way; rounds of ten take turns, so that a busy machine is busy for all of them."""
    times: List[List[float]] = [[] for _ in ways]
    for _ in range(0, repetitions, ROUND):
        for (_, _, work), taken in zip(ways, times):
            for _ in range(ROUND):
                begin = time.process_time_ns()
                work()
                taken.append((time.process_time_ns() - begin) / 1e6)
    return [sorted(taken) for taken in times]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 131_072
    repetitions = int(sys.argv[2]) if len(sys.argv) > 2 else 50
    sample = arrays(count)
    bodies = {"packed": encode_packed(sample), "json": encode_json(sample)}
    ways: List[Way] = [
        ("packed", "encode", lambda: len(encode_packed(sample))), ("json", "encode", lambda: len(encode_json(sample))),
        ("packed", "to array", lambda: to_arrays(bodies["packed"])), ("json", "to array", lambda: to_arrays(bodies["json"])),
        ("json", "to lists", lambda: to_lists(bodies["json"])),
    ]
    if importlib.util.find_spec("numpy") is not None:
        ways += [("packed", "to numpy", lambda: to_numpy(bodies["packed"])), ("json", "to numpy", lambda: to_numpy(bodies["json"]))]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"Python {platform.python_version()}, {count:,} tokens, {repetitions} repetitions, ms of processor time, load {load}")
    print(f"{'encoding':<10}{'work':<12}{'MB':>6}{'min':>8}{'median':>8}{'max':>8}")
    for (encoding, work, _), times in zip(ways, milliseconds(ways, repetitions)):
        print(f"{encoding:<10}{work:<12}{len(bodies[encoding]) / 1e6:>6.2f}{times[0]:>8.2f}{times[len(times) // 2]:>8.2f}{times[-1]:>8.2f}")


if __name__ == "__main__":
    main()
