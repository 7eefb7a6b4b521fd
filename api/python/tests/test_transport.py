"""Both clients over HTTP as it can come: repetition, broken connections, odd framing."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any, List, Optional

import holdfast
from holdfast import _calls
from holdfast.aio import AsyncClient

from . import stub
from .stub import Stub, answer, problem

FAST = holdfast.RetryPolicy(deadline_seconds=60, try_seconds=30, min_delay_seconds=0.001, max_delay_seconds=0.01)
POLICY = {"pool": "p", "policy_version": 3}


class Cases:
    """Cases that hold for both clients."""

    class Base(unittest.TestCase):
        def calls(self, url: str, calls: List["_calls.Call[Any]"], retry: holdfast.RetryPolicy = FAST, token: Optional[str] = None) -> List[Any]:
            """Carry out calls one after the other over one client; the last may raise."""
            raise NotImplementedError

        def one(self, server: Stub, call: "_calls.Call[Any]", retry: holdfast.RetryPolicy = FAST) -> Any:
            return self.calls(server.url, [call], retry)[0]

        def test_reads_are_repeated_over_faults(self) -> None:
            for name, fault in {
                "429": problem(429, "overloaded"), "502": answer("bad gateway", 502, {"Content-Type": "text/html"}),
                "503": problem(503, "unavailable"), "504": answer(None, 504), "408": problem(408, "body-timeout"),
                "hang-up": stub.hang_up, "reset": stub.reset,
                "short body": stub.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"),
                "short chunk": stub.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{"),
                "short headers": stub.raw(b"HTTP/1.1 200 OK\r\nContent-"),
            }.items():
                with self.subTest(name), Stub(fault, fault, answer(POLICY)) as server:
                    self.assertEqual(self.one(server, _calls.policy("p")).policy_version, 3)
                    self.assertEqual(len(server.requests), 3)

        def test_a_refusal_is_not_repeated(self) -> None:
            for status, kind in ((400, "invalid-json"), (401, "unauthorized"), (404, "not-found"), (409, "conflict"), (422, "invalid-request"), (500, "internal")):
                with self.subTest(kind), Stub(problem(status, kind)) as server:
                    with self.assertRaises(holdfast.ProblemError) as caught:
                        self.one(server, _calls.policy("p"))
                    self.assertEqual((caught.exception.status, len(server.requests)), (status, 1))

        def test_opening_a_run_is_never_sent_twice_if_it_may_have_arrived(self) -> None:
            create = _calls.create_run("r", "p", {"classes": [], "max_concurrency": 1})
            for name, fault in {
                "reset": stub.reset, "hang-up": stub.hang_up, "503": problem(503, "timeout"), "502": answer(None, 502),
                "short": stub.raw(b"HTTP/1.1 201 Created\r\nContent-Length: 50\r\n\r\n{"),
            }.items():
                with self.subTest(name), Stub(fault) as server:
                    with self.assertRaises(holdfast.HoldfastError):
                        self.one(server, create)
                    self.assertEqual(len(server.requests), 1)

        def test_opening_a_run_is_repeated_after_429(self) -> None:
            run = {
                "id": "i", "name": "r", "pool": "p", "state": "active", "created_at": "2026-01-02T03:04:05Z",
                "contract": {"version": 1, "classes": [], "given": [], "max_concurrency": 1, "group_policy": "partial", "created_at": "2026-01-02T03:04:05Z"},
            }
            with Stub(problem(429, "overloaded"), answer(run, 201)) as server:
                info = self.one(server, _calls.create_run("r", "p", {"classes": [], "max_concurrency": 1}))
                self.assertEqual((info.id, len(server.requests)), ("i", 2))

        def test_a_batch_is_repeated_with_the_same_key_and_bytes(self) -> None:
            batch = {
                "id": "b", "run": "r", "seq": 1, "idempotency_key": "k", "policy_version": 0, "tasks": 1, "sessions": 1,
                "sessions_by_class": {"a": 1}, "created_at": "2026-01-02T03:04:05.123456789Z",
            }
            for compress in (False, True):
                with self.subTest(compress=compress), Stub(stub.reset, problem(503, "timeout"), answer(batch, 201)) as server:
                    task = holdfast.Task("a", [1, 2], {"max_tokens": 1})
                    self.assertEqual(self.one(server, _calls.submit("r", "k", [task], 4, compress)).created_at.microsecond, 123456)
                    self.assertEqual(len(server.requests), 3)
                    self.assertEqual({(one.headers["idempotency-key"], one.body) for one in server.requests}, {("k", server.requests[0].body)})
            self.assertTrue(_calls.submit("r", "k", [], 4, False).body == b'{"policy_version":4,"tasks":[]}')

        def test_retry_after_is_waited_for(self) -> None:
            with Stub(problem(429, "overloaded", retry_after="1"), answer(POLICY)) as server:
                begin = time.monotonic()
                self.one(server, _calls.policy("p"))
                self.assertGreaterEqual(time.monotonic() - begin, 1.0)

        def test_nothing_is_repeated_beyond_the_deadline(self) -> None:
            retry = holdfast.RetryPolicy(deadline_seconds=2, try_seconds=30, min_delay_seconds=0.02, max_delay_seconds=0.05)
            with Stub(problem(503, "unavailable", "the database is gone")) as server:
                begin = time.monotonic()
                with self.assertRaises(holdfast.UnavailableError) as caught:
                    self.one(server, _calls.policy("p"), retry)
                self.assertLess(time.monotonic() - begin, 20.0)
                self.assertGreater(len(server.requests), 3)
                self.assertEqual(caught.exception.detail, "the database is gone")
            with Stub(problem(429, "overloaded", retry_after="3600")) as server:
                begin = time.monotonic()
                with self.assertRaises(holdfast.OverloadedError) as overloaded:
                    self.one(server, _calls.policy("p"), FAST)
                self.assertLess(time.monotonic() - begin, 20.0)
                self.assertEqual((overloaded.exception.retry_after, len(server.requests)), (3600.0, 1))

        def test_a_turn_that_fails_after_its_answer_began(self) -> None:
            call = _calls.generate("s", "r", [1, 2], None, {"max_tokens": 4})
            stopping = {"problem": {"type": "urn:holdfast:problem:stopping", "title": "t", "status": 503, "detail": "d"}}
            limit = {"problem": {"type": "urn:holdfast:problem:limit-reached", "title": "t", "status": 409, "detail": "no turn left"}}
            waiting = answer(body=b"\n\n" + json.dumps(stopping).encode())
            with Stub(waiting, answer(limit)) as server:
                with self.assertRaisesRegex(holdfast.LimitReachedError, "no turn left"):
                    self.one(server, call)
                self.assertEqual({one.body for one in server.requests}, {b'{"max_tokens":4,"request_id":"r","encoding":"packed","packed_token_ids":"AQAAAAIAAAA="}'})
                self.assertEqual(len(server.requests), 2)

        def test_a_download_is_whole_or_not_there(self) -> None:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "run.jsonl"

                def fetch(server: Stub) -> None:
                    with _calls.Download(path) as download:
                        self.one(server, _calls.export("r", "jsonl", "", "", (), download))

                broken = stub.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nbroken of\r\n20\r\n{")
                whole = stub.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
                with Stub(broken, problem(503, "unavailable"), whole) as server:
                    fetch(server)
                    self.assertEqual((path.read_bytes(), len(server.requests)), (b"onetwo", 3))
                with Stub(problem(404, "not-found")) as server, self.assertRaises(holdfast.NotFoundError):
                    fetch(server)
                self.assertEqual(os.listdir(directory), ["run.jsonl"])
                with Stub(whole) as server:
                    path = Path(directory) / "nowhere" / "run.jsonl"
                    with self.assertRaisesRegex(holdfast.HoldfastError, "writing .*No such file"):
                        fetch(server)
                    self.assertEqual(len(server.requests), 1, "what fails here is not asked for again")

        def test_a_service_that_does_not_listen_is_unreachable(self) -> None:
            with Stub(answer()) as server:
                url = server.url
            retry = holdfast.RetryPolicy(deadline_seconds=0.1, min_delay_seconds=0.001, max_delay_seconds=0.01)
            with self.assertRaises(holdfast.UnreachableError) as caught:
                self.calls(url, [_calls.policy("p")], retry)
            self.assertFalse(caught.exception.sent)

        def test_a_try_ends_at_its_timeout(self) -> None:
            retry = holdfast.RetryPolicy(deadline_seconds=0, try_seconds=0.2)
            slow = stub.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", close=False)

            def then_hang(handler: stub.Handler) -> None:
                slow(handler)
                stub.hang(handler)

            for name, step in {"no answer": stub.hang, "no body": then_hang}.items():
                with self.subTest(name), Stub(step) as server:
                    begin = time.monotonic()
                    with self.assertRaises(holdfast.UnreachableError) as caught:
                        self.one(server, _calls.policy("p"), retry)
                    self.assertLess(time.monotonic() - begin, 15.0)
                    self.assertIn("timed out", str(caught.exception))

        def test_a_poll_may_take_as_long_as_it_waits(self) -> None:
            call = _calls.samples("r", _calls.SamplesQuery(consumer="c"), wait=12.5)
            self.assertEqual(call.wait_seconds, 12.5)
            with Stub(answer({"samples": [], "next": "n", "more": False})) as server:
                self.assertEqual(self.one(server, call).next, "n")
                self.assertEqual(server.requests[0].path, "/api/v1/runs/r/samples?consumer=c&encoding=packed&wait=12.500s")

        def test_connections_are_kept_and_replaced(self) -> None:
            policy = _calls.policy("p")
            with Stub(answer(POLICY)) as server:
                self.calls(server.url, [policy] * 3)
                self.assertEqual([one.connection for one in server.requests], [1, 1, 1])
            # What closed an idle connection is not counted as a try.
            never = holdfast.RetryPolicy(deadline_seconds=0)
            with Stub(stub.then_close(answer(POLICY)), answer(POLICY)) as server:
                self.calls(server.url, [policy] * 2, never)
                self.assertEqual([one.connection for one in server.requests], [1, 2])
            with Stub(answer(POLICY, headers={"Connection": "close"}), answer(POLICY)) as server:
                self.calls(server.url, [policy] * 2, never)
                self.assertEqual([one.connection for one in server.requests], [1, 2])

        def test_framings_of_a_body(self) -> None:
            body = b'{"pool":"p","policy_version":3}'
            for name, text in {
                "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\n" + body[:5] + b"\r\n1A\r\n" + body[5:] + b"\r\n0\r\nTrailer: 1\r\n\r\n",
                "to the end": b"HTTP/1.1 200 OK\r\n\r\n" + body,
                "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
                "no reason": b"HTTP/1.1 200\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
                "continue first": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
            }.items():
                with self.subTest(name), Stub(stub.raw(text)) as server:
                    self.assertEqual(self.one(server, _calls.policy("p")).policy_version, 3)

        def test_what_is_no_answer_of_the_service_is_a_protocol_error(self) -> None:
            for name, step in {
                "not HTTP": stub.raw(b"220 smtp ready\r\n"), "not JSON": answer(body=b"<html>"), "not an object": answer([1]),
                "field missing": answer({"pool": "p"}), "field of another kind": answer({"pool": "p", "policy_version": "3"}),
            }.items():
                with self.subTest(name), Stub(step) as server:
                    with self.assertRaises(holdfast.ProtocolError):
                        self.one(server, _calls.policy("p"))
                    self.assertEqual(len(server.requests), 1)

        def test_a_refusal_before_the_body_is_through_is_read(self) -> None:
            refuse = problem(413, "too-large")

            def early(handler: stub.Handler) -> None:
                refuse(handler)
                handler.wfile.flush()
                # Goes on reading for a while, as the service does, before it hangs up.
                handler.rfile.read(1 << 20)
                handler.close_connection = True

            setattr(early, "early", True)
            with Stub(early) as server:
                task = holdfast.Task("a", {"text": "x" * (8 << 20)}, {})
                with self.assertRaises(holdfast.TooLargeError):
                    self.one(server, _calls.submit("r", "k", [task], None, False))

        def test_the_token_is_sent_and_nothing_breaks_the_request_apart(self) -> None:
            with Stub(answer(POLICY)) as server:
                self.calls(server.url, [_calls.policy("a/b ?#é")], token="secret-0123456789")
                self.assertEqual(server.requests[0].headers["authorization"], "Bearer secret-0123456789")
                self.assertEqual(server.requests[0].path, "/api/v1/pools/a%2Fb%20%3F%23%C3%A9/policy")
                with self.assertRaises(ValueError):
                    self.calls(server.url, [_calls.submit("r", "k\r\nX-Evil: 1", [], None, False)])
                with self.assertRaises(ValueError):
                    self.calls(server.url, [_calls.policy("p")], token="two words")
                self.assertEqual(len(server.requests), 1)


class SyncTest(Cases.Base):
    def calls(self, url: str, calls: List["_calls.Call[Any]"], retry: holdfast.RetryPolicy = FAST, token: Optional[str] = None) -> List[Any]:
        with holdfast.Client(url, token, retry=retry) as client:
            return [client.call(call) for call in calls]


class AsyncTest(Cases.Base):
    def calls(self, url: str, calls: List["_calls.Call[Any]"], retry: holdfast.RetryPolicy = FAST, token: Optional[str] = None) -> List[Any]:
        async def go() -> List[Any]:
            async with AsyncClient(url, token, retry=retry) as client:
                return [await client.call(call) for call in calls]

        return asyncio.run(go())

    def test_a_cancelled_poll_hangs_up(self) -> None:
        async def go(server: Stub) -> None:
            async with AsyncClient(server.url, retry=FAST) as client:
                poll = asyncio.ensure_future(client.call(_calls.samples("r", _calls.SamplesQuery(), 30)))
                while not server.requests and not poll.done():
                    await asyncio.sleep(0.005)
                poll.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await poll
                self.assertEqual((await client.policy("p")).policy_version, 3)

        with Stub(stub.hang, answer(POLICY)) as server:
            asyncio.run(go(server))
            self.assertEqual([one.connection for one in server.requests], [1, 2])


if __name__ == "__main__":
    unittest.main()
