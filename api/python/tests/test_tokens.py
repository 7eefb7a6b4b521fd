"""Packed and JSON tokens are the same, and broken ones are told."""

from __future__ import annotations

import base64
import importlib.util
import json
import pickle
import random
import struct
import unittest
from array import array
from typing import Any, Dict, List

import holdfast
from holdfast.documents import page_of, sample_of

BASE: Dict[str, Any] = {
    "id": "i", "seq": 1, "cursor": "c", "run": "r", "batch": "b", "task": "t", "task_id": "x", "member": 0, "group_size": 1,
    "class": "rlvr", "status": "completed", "released_at": "2026-01-02T03:04:05.123456789Z", "reward": 1,
    "segments": [
        {"kind": "prompt", "turn": 0, "start": 0, "count": 2, "policy_version": 4},
        {"kind": "generated", "turn": 0, "start": 2, "count": 3, "policy_version": 4},
    ],
}


def packed_of(ids: List[int], mask: List[int], logprobs: "List[float] | None") -> Dict[str, Any]:
    """Pack with struct, independently of the code under test."""
    packed: Dict[str, Any] = {
        "count": len(ids), "token_ids": base64.b64encode(struct.pack(f"<{len(ids)}i", *ids)).decode(),
        "loss_mask": base64.b64encode(bytes(mask)).decode(),
    }
    if logprobs is not None:
        packed["logprobs"] = base64.b64encode(struct.pack(f"<{len(logprobs)}f", *logprobs)).decode()
    return packed


class TokensTest(unittest.TestCase):
    def test_packed_equals_json(self) -> None:
        rng = random.Random(7)
        for count in (0, 1, 2, 3, 1000):
            ids = [rng.randrange(-2**31, 2**31) for _ in range(count)]
            mask = [rng.randrange(2) for _ in range(count)]
            logprobs = [struct.unpack("<f", struct.pack("<f", -rng.expovariate(1)))[0] for _ in range(count)]
            for given in (logprobs, None):
                plain: Dict[str, Any] = {"token_ids": ids, "loss_mask": mask}
                if given is not None:
                    plain["logprobs"] = given
                one = sample_of({**BASE, "packed": packed_of(ids, mask, given)})
                other = sample_of(json.loads(json.dumps({**BASE, "tokens": plain})))
                self.assertEqual(one.token_ids, other.token_ids)
                self.assertEqual(list(one.token_ids), ids)
                self.assertEqual(one.loss_mask, other.loss_mask)
                self.assertEqual(list(one.loss_mask), mask)
                self.assertEqual(one.logprobs, other.logprobs)
                self.assertEqual(given is None, one.logprobs is None)
                self.assertEqual(one, other)

    def test_broken_tokens_are_protocol_errors(self) -> None:
        good = packed_of([1, 2, 3], [0, 1, 1], [0.0, -1.0, -2.0])
        for name, change in {
            "too few ids": {"token_ids": good["token_ids"][:4]}, "not base64": {"loss_mask": "A"},
            "not whole elements": {"logprobs": base64.b64encode(b"12345").decode()}, "not text": {"token_ids": 5},
        }.items():
            with self.subTest(name), self.assertRaises(holdfast.ProtocolError):
                sample = sample_of({**BASE, "packed": {**good, **change}})
                repr((sample.token_ids, sample.loss_mask, sample.logprobs))
        with self.assertRaises(holdfast.ProtocolError):
            sample_of({**BASE, "packed": {}})
        with self.assertRaises(holdfast.ProtocolError):
            sample_of({**BASE, "tokens": {"token_ids": [2**31], "loss_mask": [1]}}).token_ids

    def test_a_sample_without_tokens_says_so(self) -> None:
        with self.assertRaises(LookupError):
            sample_of(BASE).token_ids

    def test_a_sample_keeps_what_the_service_tells(self) -> None:
        sample = sample_of({**BASE, "times": {"held_seconds": 2, "new_seconds": 1}, "metadata": {"row": 7}, "score_detail": [1]})
        self.assertEqual((sample.class_name, sample.reward, sample.times.held_seconds), ("rlvr", 1.0, 2.0))
        self.assertEqual((sample.prompt_count, sample.segments[1].policy_version, sample.usable), (2, 4, True))
        self.assertEqual((sample.metadata, sample.score_detail), ({"row": 7}, [1]))
        assert sample.released_at is not None
        self.assertEqual(sample.released_at.isoformat(), "2026-01-02T03:04:05.123456+00:00")
        self.assertIsNone(sample_of({k: v for k, v in BASE.items() if k != "reward"}).reward)
        with self.assertRaises(holdfast.ProtocolError):
            page_of({"samples": [{**BASE, "seq": "1"}], "next": "n", "more": False})

    def test_a_sample_of_several_sequences_is_not_taken_for_one(self) -> None:
        sequences: List[Dict[str, Any]] = [
            {"kept_tokens": 0, "segments": BASE["segments"], "packed": packed_of([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], None)},
            {"kept_tokens": 2, "segments": [{**BASE["segments"][0], "kind": "kept"}, BASE["segments"][1]], "packed": packed_of([1, 2, 7, 8, 9], [0, 0, 1, 1, 1], None)},
        ]
        sample = sample_of({key: value for key, value in {**BASE, "sequences": sequences}.items() if key != "segments"})
        self.assertEqual([(list(one.token_ids), sum(one.loss_mask), one.kept_tokens, one.prompt_count) for one in sample.sequences], [
            ([1, 2, 3, 4, 5], 3, 0, 2), ([1, 2, 7, 8, 9], 3, 2, 2)])
        for name in ("token_ids", "loss_mask", "logprobs", "prompt_count"):
            with self.subTest(name), self.assertRaisesRegex(LookupError, "2 sequences"):
                getattr(sample, name)
        (only,) = sample_of({**BASE, "packed": packed_of([1], [1], None)}).sequences
        self.assertEqual((list(only.token_ids), only.kept_tokens), ([1], 0))

    def test_samples_pass_between_processes(self) -> None:
        sample = sample_of({**BASE, "packed": packed_of([1, 2], [0, 1], None)})
        again = pickle.loads(pickle.dumps(sample))
        self.assertEqual((again, again.token_ids), (sample, array("i", [1, 2])))

    def test_numpy_is_optional_and_shares_memory(self) -> None:
        sample = sample_of({**BASE, "packed": packed_of([1, 2, 3], [0, 1, 1], [0.0, -1.0, -2.0])})
        if importlib.util.find_spec("numpy") is None:
            with self.assertRaises(ImportError):
                sample.numpy()
            return
        ids, mask, logprobs = sample.numpy()
        assert logprobs is not None
        self.assertEqual((ids.dtype.name, mask.dtype.name, logprobs.dtype.name), ("int32", "uint8", "float32"))
        self.assertEqual((ids.tolist(), mask.tolist(), logprobs.tolist()), ([1, 2, 3], [0, 1, 1], [0.0, -1.0, -2.0]))
        ids[0] = 9
        self.assertEqual(sample.token_ids[0], 9)
        self.assertIsNone(sample_of({**BASE, "packed": packed_of([1], [1], None)}).numpy().logprobs)


class ColumnsTest(unittest.TestCase):
    def test_arrays_of_the_standard_library(self) -> None:
        for code, dtype in (("b", "int8"), ("H", "uint16"), ("i", "int32"), ("q", "int64"), ("f", "float32"), ("d", "float64")):
            column = holdfast.Column.of("c", array(code, [1, 2, 3]))
            self.assertEqual((column.dtype, column.shape, len(column.to_bytes())), (dtype, [3], 3 * array(code).itemsize))
        for wrong in ([1, 2], array("u", "ab")):
            with self.assertRaises(TypeError):
                holdfast.Column.of("c", wrong)
        with self.assertRaises(holdfast.ProtocolError):
            holdfast.Column("c", "int8", [1], "abc").to_bytes()

    def test_arrays_of_numpy(self) -> None:
        if importlib.util.find_spec("numpy") is None:
            with self.assertRaises(ImportError):
                holdfast.Column.of("c", array("f", [1.0])).numpy()
            return
        numpy: Any = importlib.import_module("numpy")
        given = numpy.arange(6, dtype=">i4").reshape(2, 3).T
        column = holdfast.Column.of("c", given)
        self.assertEqual((column.dtype, column.shape), ("int32", [3, 2]))
        self.assertEqual(column.numpy().tolist(), given.tolist())


class TasksTest(unittest.TestCase):
    def body(self, *tasks: holdfast.tasks.AnyTask) -> Any:
        return json.loads(holdfast.tasks.batch_body(tasks, None))["tasks"]

    def test_forms_of_a_task(self) -> None:
        task = holdfast.Task("a", range(1, 4), {"max_tokens": 5}, id="x", group_size=2, scorer={"kind": "exact_match"}, metadata=0)
        expected = {
            "class": "a", "prompt": {"token_ids": [1, 2, 3]}, "sampling": {"max_tokens": 5}, "id": "x", "group_size": 2,
            "scorer": {"kind": "exact_match"}, "metadata": 0,
        }
        self.assertEqual(self.body(task, expected), [expected, expected])
        self.assertEqual(self.body(holdfast.Task("a", array("i", [1, 2]), {}))[0]["prompt"], {"token_ids": [1, 2]})
        self.assertEqual(self.body(holdfast.Task("a", {"synthetic": {"tokens": 9}}, {}))[0]["prompt"], {"synthetic": {"tokens": 9}})
        if importlib.util.find_spec("numpy") is not None:
            numpy: Any = __import__("numpy")
            prompt, temperature = numpy.array([1, 2], dtype="int64"), numpy.float32(0.5)
            self.assertEqual(self.body(holdfast.Task("a", prompt, {"temperature": temperature}))[0], {
                "class": "a", "prompt": {"token_ids": [1, 2]}, "sampling": {"temperature": 0.5}})

    def test_what_json_cannot_say_names_the_task(self) -> None:
        good = holdfast.Task("a", [1], {})
        with self.assertRaisesRegex(ValueError, r"^tasks\[1\]"):
            self.body(good, holdfast.Task("a", [1], {"temperature": float("nan")}))
        with self.assertRaisesRegex(TypeError, r"^tasks\[2\].*object"):
            self.body(good, good, holdfast.Task("a", [1], {}, metadata=object()))

    def test_a_contract_writes_what_was_given(self) -> None:
        self.assertEqual(holdfast.Contract({"a": 0.25, "b": 0.75}, 8, staleness_bound=0).to_json(), {
            "classes": [{"class": "a", "share": 0.25}, {"class": "b", "share": 0.75}], "max_concurrency": 8, "staleness_bound": 0})


if __name__ == "__main__":
    unittest.main()
