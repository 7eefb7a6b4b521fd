"""The service's refusals, as the client raises them."""

from __future__ import annotations

import asyncio
import unittest
from typing import Any, Optional

import holdfast
from holdfast import _calls, documents
from holdfast.aio import AsyncClient

from . import service
from .case import NO_REPETITION


class ErrorsTest(unittest.TestCase):
    """Each refusal of the real service; runs on a pool without engines, where nothing moves."""

    client: holdfast.Client
    run_: holdfast.Run

    @classmethod
    def setUpClass(cls) -> None:
        cls.client = service.client(retry=NO_REPETITION)
        cls.run_ = service.new_run(cls.client, pool="without-engines")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.run_.end()
        cls.client.close()

    def refused(self, expected: "type[holdfast.ProblemError]", call: "_calls.Call[Any]", location: str = "", by: Optional[holdfast.Client] = None) -> holdfast.ProblemError:
        with self.assertRaises(expected) as caught:
            (by or self.client).call(call)
        error = caught.exception
        self.assertIs(type(error), expected)
        self.assertTrue(error.detail and error.title and error.request_id, error.__dict__)
        if location:
            self.assertEqual(error.errors[0].location, location)
        return error

    def submit(self, *tasks: Any) -> "_calls.Call[documents.Batch]":
        return _calls.submit(self.run_.id, "key", tasks, None, False)

    def test_a_body_that_is_not_json(self) -> None:
        call = self.submit(holdfast.Task("rlvr", [1], {"max_tokens": 1}))
        call.body = b'{"tasks":[{"class":"rlvr","sampling":{"temperature":NaN}}]}'
        error = self.refused(holdfast.InvalidJSONError, call)
        assert error.errors[0].offset_bytes is not None
        self.assertAlmostEqual(error.errors[0].offset_bytes, call.body.index(b"NaN"), delta=4)

    def test_fields_that_are_not_acceptable(self) -> None:
        good = holdfast.Task("rlvr", [1], {"max_tokens": 1})
        self.refused(holdfast.InvalidRequestError, self.submit(good, holdfast.Task("rlvr", [1], {"max_tokens": -1})), "body.tasks[1].sampling.max_tokens")
        self.refused(holdfast.InvalidRequestError, self.submit(holdfast.Task("rlvr", [1], {"max_tokens": 1}, extra={"colour": 1})), "body.tasks[0].colour")
        error = self.refused(holdfast.UnknownClassError, self.submit(good, holdfast.Task("sft", [1], {"max_tokens": 1})), "body.tasks[1].class")
        self.assertEqual(error.errors[0].value, "sft")
        self.refused(holdfast.InvalidRequestError, _calls.create_run("r", "p", {"classes": [{"class": "a", "share": 0.4}], "max_concurrency": 1}))
        self.refused(holdfast.InvalidRequestError, _calls.samples(self.run_.id, _calls.SamplesQuery(limit=0), 0), "query.limit")

    def test_cursors(self) -> None:
        self.refused(holdfast.UnknownCursorError, _calls.samples(self.run_.id, _calls.SamplesQuery(after="AAAA"), 0), "query.after")
        self.refused(holdfast.UnknownCursorError, _calls.ack(self.run_.id, "nobody", "AAAA"), "body.cursor")

    def test_what_is_not_there(self) -> None:
        self.refused(holdfast.NotFoundError, _calls.backlog("00000000-0000-0000-0000-000000000001"))
        self.refused(holdfast.NotFoundError, _calls.get_session("00000000-0000-0000-0000-000000000001"))
        self.refused(holdfast.NotFoundError, _calls.Call("GET", ["nothing"], lambda _: None))
        self.refused(holdfast.MethodNotAllowedError, _calls.Call("DELETE", ["runs"], lambda _: None))

    def test_too_large(self) -> None:
        error = self.refused(holdfast.TooLargeError, self.submit(holdfast.Task("rlvr", {"text": "x" * (17 << 20)}, {"max_tokens": 1})))
        self.assertIn("tasks[0]", error.errors[0].location)
        asyncio.run(self.too_large_asynchronously())

    async def too_large_asynchronously(self) -> None:
        async with AsyncClient(service.shared().url, service.TOKENS["trainer"], retry=NO_REPETITION) as client:
            with self.assertRaises(holdfast.TooLargeError):
                await client.call(self.submit(holdfast.Task("rlvr", {"text": "x" * (17 << 20)}, {"max_tokens": 1})))

    def test_media_types(self) -> None:
        call = self.submit(holdfast.Task("rlvr", [1], {"max_tokens": 1}))
        call.headers = {**call.headers, "Content-Encoding": "br"}
        self.refused(holdfast.UnsupportedMediaTypeError, call)

    def test_tokens_and_roles(self) -> None:
        with holdfast.Client(service.shared().url, "not-a-known-token", retry=NO_REPETITION) as stranger:
            self.refused(holdfast.UnauthorizedError, _calls.pools(), by=stranger)
        with service.client("viewer") as viewer:
            self.assertIn("default", [pool.name for pool in viewer.pools()])
            self.refused(holdfast.ForbiddenError, self.submit(), by=viewer)
            self.refused(holdfast.ForbiddenError, _calls.samples(self.run_.id, _calls.SamplesQuery(consumer="c"), 0), by=viewer)
            self.assertEqual(list(viewer.open_run(self.run_.id).samples(consumer="", timeout=0)), [])

    def test_conflicts(self) -> None:
        self.refused(holdfast.ConflictError, _calls.create_run("other", "without-engines", service.CONTRACT))

    def test_engines(self) -> None:
        error = self.refused(holdfast.EngineDoesNotAnswerError, _calls.register_instance("without-engines", {"id": "e", "url": "http://127.0.0.1:9"}))
        self.assertEqual(error.errors[0].location, "body.url")
        with service.client("operator") as operator:
            known = operator.instances()
            self.assertEqual([one.state for one in known], ["active"] * len(known))
            operator.register_instance({"id": "extra", "url": known[0].url, "kind": "simulated", "ttl_seconds": 60}, pool="spare")
            operator.heartbeat_instance("extra", pool="spare")
            operator.drain_instance("extra", pool="spare")
            self.assertEqual([one.state for one in operator.instances("spare")], ["draining"])
            operator.remove_instance("extra", pool="spare")
            self.assertEqual(operator.instances("spare"), [])

    def test_a_router_that_runs_elsewhere(self) -> None:
        error = self.refused(holdfast.NotOwnerError, _calls.router("without-engines"))
        self.assertEqual(error.retry_after, 1.0)
        self.assertEqual(self.client.router()["pool"], "default")


if __name__ == "__main__":
    unittest.main()
