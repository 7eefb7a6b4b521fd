"""The clients against the real service: real HTTP, Postgres and Temporal, simulated engines."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import time
import typing
import unittest
import urllib.request
from array import array
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set

import holdfast
from holdfast import _calls, documents
from holdfast.aio import AsyncClient

from . import service

T = typing.TypeVar("T")


def take(count: int, stream: Iterator[T]) -> List[T]:
    """The next so many of a stream, and no look at what comes after them."""
    return list(itertools.islice(stream, count))


NO_REPETITION = holdfast.RetryPolicy(deadline_seconds=0)


class ServiceCase(unittest.TestCase):
    """A case with a client and a run of its own on the pool that has engines."""

    def setUp(self) -> None:
        self.client = service.client()
        self.addCleanup(self.client.close)
        self.run_ = service.new_run(self.client)
        self.addCleanup(self.run_.end)

    def another(self) -> holdfast.Run:
        """The run as a trainer finds it again after a crash: a new client, nothing remembered."""
        client = service.client()
        self.addCleanup(client.close)
        return client.run(self.run_.info.name)


class RunTest(ServiceCase):
    def test_a_run_is_gone_on_with_and_its_contract_replaced(self) -> None:
        again = self.client.run(self.run_.info.name)
        self.assertEqual((again.id, again.info.contract.version), (self.run_.id, 1))
        again = self.client.run(self.run_.info.name, contract=service.CONTRACT)
        self.assertEqual((again.id, again.info.contract.version), (self.run_.id, 1), "an equal contract makes no version")
        again = self.client.run(self.run_.info.name, contract={"classes": [{"class": "agent", "share": 1}], "max_concurrency": 3})
        self.assertEqual((again.id, again.info.contract.version, again.info.contract.max_concurrency), (self.run_.id, 2, 3))
        self.assertEqual([one.version for one in again.contract_history()], [1, 2])
        self.assertEqual(self.client.open_run(self.run_.id).info.name, self.run_.info.name)
        with self.assertRaises(holdfast.ConflictError):
            self.client.run("another", contract=service.CONTRACT)
        with self.assertRaises(ValueError):
            self.client.run("another", pool="never-used")

    def test_submit_iterate_acknowledge(self) -> None:
        batch = self.run_.submit(service.tasks(6, group_size=2), key="step-1")
        self.assertEqual((batch.tasks, batch.sessions, batch.replayed, batch.idempotency_key), (6, 12, False, "step-1"))
        stream = self.run_.samples(timeout=60, limit=5)
        samples = take(12, stream)
        self.assertEqual([one.seq for one in samples], list(range(1, 13)))
        self.assertEqual(len({one.id for one in samples}), 12)
        for one in samples:
            self.assertTrue(one.usable, one.problem)
            self.assertEqual((one.batch, one.class_name, one.metadata["row"]), (batch.id, "rlvr", int(one.task_id[1:])))
            prompt = one.prompt_count
            self.assertEqual(list(one.token_ids[:prompt]), [1, 2, 3 + one.metadata["row"]])
            assert one.logprobs is not None
            self.assertEqual(list(one.loss_mask), [0] * prompt + [1] * (len(one.token_ids) - prompt))
            self.assertTrue(all(value <= 0 for value in one.logprobs[prompt:]), one.logprobs)
            self.assertEqual({segment.policy_version for segment in one.segments}, {one.policy_version})
        acknowledged = stream.ack()
        assert acknowledged is not None
        self.assertEqual(acknowledged.acknowledged_seq, 12)
        self.assertEqual(list(self.run_.samples(timeout=0)), [], "nothing that was acknowledged comes again")
        self.assertEqual(len(list(self.run_.samples(timeout=0, consumer=""))), 12, "without a consumer all can be read")
        self.assertEqual(self.run_.batch(batch.id).sessions, 12)

        backlog = self.run_.backlog()
        self.assertEqual((backlog.total.released, backlog.total.ended, backlog.total.backlog), (12, 12, 0))
        mixture = self.run_.mixture(window=600)
        self.assertEqual({one.class_name: one.consumed for one in mixture.total.classes}, {"agent": 0, "rlvr": 12})
        self.assertAlmostEqual(mixture.total.tv_consumed_pp, 50.0)
        assert mixture.window is not None
        self.assertAlmostEqual(mixture.window.tv_rho_pp, 50.0)
        metrics = self.run_.metrics((self.run_.info.created_at, None))
        self.assertEqual((metrics.total.samples, metrics.total.output_tokens), (12, sum(sum(one.loss_mask) for one in samples)))
        self.assertEqual(self.run_.metrics(600.0).total.samples, 12)

    def test_a_crash_between_receiving_and_acknowledging(self) -> None:
        self.run_.submit(service.tasks(10))
        stream = self.run_.samples(timeout=60, limit=4)
        received = [next(stream) for _ in range(7)]
        self.run_.ack(received[3].cursor)
        # The trainer dies here: samples 5 to 7 were received and not acknowledged.
        again = self.another().samples(timeout=60)
        rest = [next(again) for _ in range(6)]
        self.assertEqual([one.id for one in rest[:3]], [one.id for one in received[4:]])
        self.assertEqual([one.seq for one in rest], list(range(5, 11)))
        self.assertEqual(rest[0].token_ids, received[4].token_ids)
        again.ack()
        self.assertEqual(list(self.another().samples(timeout=0)), [])
        place = {one.consumer: one.acknowledged_seq for one in self.run_.consumers()}
        self.assertEqual(place, {"trainer": 10})

    def test_groups_across_a_crash(self) -> None:
        sizes = {"x": 3, "y": 2, "z": 1}
        tasks = [dataclasses.replace(one, id=f"{name}{one.id}", group_size=size) for name, size in sizes.items() for one in service.tasks(4)]
        self.run_.submit(tasks)
        groups = self.run_.groups(timeout=60, limit=3)
        taken = [next(groups) for _ in range(5)]
        cursor = groups.cursor
        durable = [group.task for group in taken]
        groups.ack()
        taken_too_late = next(groups)  # received, but the trainer dies before it is durable
        again = self.another().groups(after=cursor, timeout=60)
        rest = [next(again) for _ in range(7)]
        self.assertIn(taken_too_late.task, {group.task for group in rest})
        self.assertEqual(sorted(durable + [group.task for group in rest]), sorted({*durable, *(group.task for group in rest)}), "none twice")
        self.assertEqual(sorted(len(group.samples) for group in taken + rest), sorted(list(sizes.values()) * 4))
        for group in taken + rest:
            self.assertEqual([one.member for one in group.samples], list(range(len(group.samples))))
            self.assertEqual({one.task for one in group.samples}, {group.task})
        acknowledged = again.ack()
        assert acknowledged is not None
        self.assertEqual((acknowledged.acknowledged_seq, acknowledged.groups), (24, "whole"))
        older = self.another().groups(after=cursor, timeout=0)
        self.assertEqual([group.task for group in older], [group.task for group in rest], "a checkpoint older than what was acknowledged is gone on from")
        with self.assertRaisesRegex(holdfast.ConflictError, "keeps to one order"):
            next(self.run_.samples(timeout=0))
        self.assertEqual(len(list(self.run_.groups(consumer="", timeout=0))), 12, "without a consumer all can be read")

    def test_groups_that_were_refilled_and_that_are_partial(self) -> None:
        ended = self.run_.samples(consumer="", timeout=60, encoding="none")
        for policy, statuses, outcome in (
            ("refill", ["completed", "failed", "completed"], "complete"), ("partial", ["completed", "failed"], "partial"),
        ):
            with self.subTest(policy):
                contract = dataclasses.replace(service.CONTRACT, group_policy=policy, group_refills=1 if policy == "refill" else None)
                self.assertEqual(self.run_.put_contract(contract).group_policy, policy)
                task = holdfast.Task("agent", [1, 2], {"max_tokens": 4}, id=policy, group_size=2, environment={"kind": "external"})
                batch = self.run_.submit([task])
                groups = self.run_.groups(timeout=60)
                # The harness ends each member in its turn; a failed one may bring forth another.
                for number, status in enumerate(statuses):
                    (member,) = (one for one in self.run_.sessions(batch=batch.id) if one.member == number)
                    session = self.run_.session(member.id)
                    session.generate("turn-0")
                    session.complete(status, reward=1.0 if status == "completed" else None, problem="broke" if status == "failed" else "")
                    self.assertEqual(next(ended).id, member.id)
                group = next(groups)
                self.assertEqual((group.task_id, group.size, group.outcome), (policy, 2, outcome))
                self.assertEqual([(one.member, one.status) for one in group.samples], list(enumerate(statuses)))
                self.assertEqual({(one.group_size, one.group_members, one.group_outcome) for one in group.samples}, {(2, len(statuses), outcome)})
                self.assertEqual((len(group.usable), group.without_signal), (statuses.count("completed"), policy == "refill"))
                groups.ack()
        total = self.run_.backlog().total
        self.assertEqual((total.released, total.failed, total.groups_ended, total.groups_without_signal), (5, 2, 2, 1))

    def test_submitting_again(self) -> None:
        tasks = service.tasks(3)
        first = self.run_.submit(tasks, key="k", policy_version=0)
        again = self.another().submit(tasks, key="k", policy_version=0, compress=True)
        self.assertEqual((first.id, first.replayed, again.id, again.replayed), (again.id, False, first.id, True))
        with self.assertRaises(holdfast.IdempotencyKeyReusedError) as caught:
            self.run_.submit(service.tasks(4), key="k")
        self.assertEqual(caught.exception.errors[0].location, "header.Idempotency-Key")
        self.assertNotEqual(self.run_.submit(tasks).id, self.run_.submit(tasks).id, "without a key each is its own batch")
        self.assertEqual(self.run_.backlog().total.released, 9)

    def test_places_to_begin_at_and_one_batch(self) -> None:
        first = self.run_.submit(service.tasks(3))
        begun = take(3, self.run_.samples(timeout=60, encoding="none"))
        late = self.run_.samples(consumer="late", start="now", timeout=0, encoding="none")
        self.assertEqual(list(late), [], "what is there already is not its to read")
        second = self.run_.submit(service.tasks(2))
        self.assertEqual({one.batch for one in take(2, self.run_.samples(batch=second.id, timeout=60, encoding="none"))}, {second.id})
        self.assertEqual([one.id for one in self.run_.samples(batch=first.id, timeout=0, encoding="none")], [one.id for one in begun])
        self.assertEqual({one.batch for one in take(2, self.run_.samples(consumer="late", start="beginning", timeout=60))}, {second.id})
        self.assertEqual({one.consumer: one.start_seq for one in self.run_.consumers()}, {"trainer": 0, "late": 3})
        with self.assertRaises(holdfast.InvalidRequestError):
            next(self.run_.samples(consumer="trainer", batch=first.id))
        self.assertEqual(self.run_.backlog().undelivered, 5)
        self.run_.remove_consumer("late")
        self.assertEqual([one.consumer for one in self.run_.consumers()], ["trainer"])
        with self.assertRaises(holdfast.NotFoundError):
            self.run_.remove_consumer("late")

    def test_back_pressure(self) -> None:
        contract = self.run_.put_contract(dataclasses.replace(service.CONTRACT, undelivered_limit=4))
        self.assertEqual(contract.undelivered_limit, 4)
        self.run_.submit(service.tasks(4))
        stream = self.run_.samples(timeout=60)
        take(4, stream)
        self.run_.submit(service.tasks(1))
        backlog = self.run_.backlog()
        self.assertEqual((backlog.undelivered, backlog.undelivered_limit, backlog.total.queued), (4, 4, 1))
        self.assertIn("undelivered samples 4 of 4", backlog.total.paused)
        (queued,) = self.run_.sessions(state="queued")
        self.assertIn("undelivered", queued.queue_reason)
        stream.ack()
        self.assertEqual(next(stream).id, queued.id, "what was paused goes on after the acknowledgement")

    def test_packed_equals_json(self) -> None:
        self.run_.submit(service.tasks(3, group_size=2))
        take(6, self.run_.samples(timeout=60))  # only then are the groups whole, which their samples tell
        packed = take(6, self.run_.samples(timeout=60))
        plain = take(6, self.run_.samples(timeout=60, encoding="json"))
        self.assertEqual(packed, plain)
        for one, other in zip(packed, plain):
            self.assertEqual((one.token_ids, one.loss_mask, one.logprobs), (other.token_ids, other.loss_mask, other.logprobs))
        with self.assertRaises(LookupError):
            next(self.run_.samples(timeout=0, encoding="none")).token_ids

    def test_big_samples_in_pages_of_bytes(self) -> None:
        prompt = list(range(1, 100_001))
        tasks = [holdfast.Task("agent", prompt, {"max_tokens": 64, "ignore_eos": True}, id=str(i)) for i in range(3)]
        self.run_.submit(tasks)
        samples = take(3, self.run_.samples(timeout=60, max_bytes=1_000_000))
        for one in samples:
            self.assertEqual((one.status, len(one.token_ids)), ("truncated", 100_064))
            self.assertEqual((list(one.token_ids[:100_000]), sum(one.loss_mask)), (prompt, 64))
        page = self.client.call(_calls.samples(self.run_.id, _calls.SamplesQuery(max_bytes=1_000_000), 0))
        self.assertEqual((len(page.samples), page.more), (1, True))

    def test_a_stream_ends_with_its_run_and_filters(self) -> None:
        self.run_.submit(service.tasks(2))
        begin = time.monotonic()
        stream = self.run_.samples(statuses=["completed", "truncated"])
        first = [next(stream), next(stream)]
        self.run_.submit([holdfast.Task("rlvr", [1], {"max_tokens": 100_000}) for _ in range(3)])
        self.run_.end()
        rest = list(stream)
        self.assertEqual(rest, [], "what ended as cancelled was not asked for")
        self.assertLess(time.monotonic() - begin, 45)
        statuses = [one.status for one in self.run_.samples(consumer="", statuses=["cancelled"])]
        self.assertEqual((len(first), statuses), (2, ["cancelled"] * 3))
        with self.assertRaises(holdfast.RunEndedError):
            self.run_.submit(service.tasks(1))

    def test_the_audit_of_a_session(self) -> None:
        turns = [{"output_tokens": 5, "gap_seconds": 0.01, "append_tokens": 3}] * 3 + [{"output_tokens": 5}]
        task = holdfast.Task("agent", [1, 2, 3], {}, environment={"kind": "replay", "turns": turns, "reward": 0.5}, scorer={"kind": "environment"})
        self.run_.submit([task])
        stream = self.run_.samples(timeout=60)
        sample = next(stream)
        stream.ack()
        self.assertEqual((sample.status, sample.reward, sample.usage.turns), ("completed", 0.5, 4))
        self.assertEqual([(one.kind, one.turn, one.count) for one in sample.segments][:3], [("prompt", 0, 3), ("generated", 0, 5), ("appended", 1, 3)])
        session = self.run_.session(sample.id)
        info = session.info()
        self.assertEqual((info.state, info.status, info.sample_seq, info.reward), ("ended", "completed", 1, 0.5))
        self.assertEqual([(one.turn, one.output_tokens) for one in session.turns()], [(0, 5), (1, 5), (2, 5), (3, 5)])
        history = session.events()
        kinds = [event.kind for event in history.events]
        self.assertEqual((kinds[0], kinds[-1], kinds.count("turn")), ("released", "ended", 4))
        self.assertEqual([one.seq for one in history.events], list(range(1, len(kinds) + 1)))
        self.assertEqual([(one.consumer, one.acknowledged_at is not None) for one in history.deliveries], [("trainer", True)])
        self.assertEqual([one.id for one in self.run_.sessions(state="ended", class_name="agent")], [sample.id])
        # The same over pages of two.
        page = self.client.call(_calls.events(sample.id, 0, 2))
        self.assertEqual((len(page.events), page.next), (2, 2))
        self.assertEqual(self.client.call(_calls.turns(sample.id, -1, 2)).next, 1)

    def test_deadlines_and_freshness(self) -> None:
        contract = self.run_.put_contract(dataclasses.replace(
            service.CONTRACT, freshness_budget_seconds=60, class_freshness_budget_seconds={"agent": 0.001}, stale_policy="restart", max_restarts=1))
        budgets = {one.class_name: one.freshness_budget_seconds for one in contract.classes}
        self.assertEqual((contract.freshness_budget_seconds, budgets, contract.stale_policy, contract.max_restarts), (60, {"agent": 0.001, "rlvr": 0}, "restart", 1))
        # A harness that never asks for a turn: the deadline ends its session, not the idle limit.
        late = holdfast.Task("agent", [1], {"max_tokens": 4}, deadline_seconds=1.0, environment={"kind": "external", "idle_seconds": 600})
        self.run_.submit([late])
        (session,) = self.run_.sessions()
        assert session.deadline_at is not None and session.released_at is not None
        self.assertAlmostEqual((session.deadline_at - session.released_at).total_seconds(), 1.0, delta=0.01)
        sample = next(self.run_.samples(timeout=60))
        self.assertEqual((sample.id, sample.status, sample.reward), (session.id, "stale", None))
        backlog = self.run_.backlog()
        self.assertEqual((backlog.total.stale, backlog.total.expired, backlog.total.over_bound, backlog.total.restarts), (1, 1, 0, 0))
        self.assertEqual({one.class_name: one.freshness_budget_seconds for one in backlog.classes}, {"agent": 0.001, "rlvr": 60.0})

    def test_pace_export_and_audit(self) -> None:
        before = self.run_.pace(group_size=2)
        self.assertEqual((before.limited_by, before.group_size, {one.class_name for one in before.classes}), ("cold_start", 2, {"agent", "rlvr"}))
        self.assertEqual(sum(one.release_sessions for one in before.classes), before.release_sessions)
        self.assertGreater(before.release_sessions, 0)
        self.assertTrue(before.why)
        self.run_.submit(service.tasks(3))
        stream = self.run_.samples(timeout=60)
        samples = take(3, stream)
        stream.ack()
        self.assertEqual({one.class_name: one.released for one in self.run_.pace().classes}, {"agent": 0, "rlvr": 3})
        directory = Path(service.new_dir())
        self.run_.export(directory / "run.jsonl")
        lines = [json.loads(line) for line in (directory / "run.jsonl").read_text().splitlines()]
        self.assertEqual([(one["id"], one["tokens"]["token_ids"]) for one in lines], [(one.id, list(one.token_ids)) for one in samples])
        self.run_.export(directory / "run.parquet", after=samples[0].cursor)
        self.assertEqual((directory / "run.parquet").read_bytes()[:4], b"PAR1")
        with self.assertRaises(holdfast.InvalidRequestError):
            self.run_.export(directory / "run.csv")
        self.assertEqual(sorted(path.name for path in directory.iterdir()), ["run.jsonl", "run.parquet"])
        audit = self.run_.session(samples[0].id).audit()
        self.assertEqual((audit.session.id, audit.release.policy_version, audit.retries, len(audit.turns), len(audit.admissions)), (samples[0].id, samples[0].policy_version, 0, 1, 1))
        self.assertEqual([one.consumer for one in audit.deliveries if one.acknowledged_at], ["trainer"])
        self.assertEqual((audit.events[0].kind, audit.more, audit.history_pruned), ("released", False, False))

    def test_cancelling(self) -> None:
        self.run_.submit([holdfast.Task("rlvr", [1], {"max_tokens": 100_000})])
        (info,) = self.run_.sessions()
        self.client.session(info.id).cancel("not needed")
        sample = next(self.run_.samples(timeout=60))
        self.assertEqual((sample.id, sample.status, sample.usable, sample.reward), (info.id, "cancelled", False, None))
        again = self.client.session(info.id).cancel()
        self.assertEqual((again.status, again.cancel_reason), ("cancelled", "not needed"))

    def test_threads_share_a_client(self) -> None:
        self.run_.submit(service.tasks(20))
        found: Dict[str, List[int]] = {}

        def read(name: str) -> None:
            found[name] = [one.seq for one in take(20, self.run_.samples(timeout=60, consumer=name, limit=3))]

        threads = [threading.Thread(target=read, args=(f"reader-{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, {f"reader-{i}": list(range(1, 21)) for i in range(8)})


class RestartTest(unittest.TestCase):
    def test_a_stream_goes_on_when_the_service_is_killed(self) -> None:
        with service.client(retry=holdfast.RetryPolicy(deadline_seconds=180, max_delay_seconds=1)) as client:
            run = service.new_run(client)
            try:
                run.submit(service.tasks(4))
                stream = run.samples(timeout=120)
                received = take(2, stream)
                stream.ack()
                run.submit(service.tasks(4, max_tokens=2000, prefix="long"), key="long")
                service.shared().crash_and_restart()
                self.assertTrue(run.submit(service.tasks(4, max_tokens=2000, prefix="long"), key="long").replayed)
                received += take(6, stream)
                self.assertEqual([one.seq for one in received], list(range(1, 9)))
                self.assertEqual((len({one.id for one in received}), [one.usable for one in received]), (8, [True] * 8))
                acknowledged = stream.ack()
                assert acknowledged is not None
                self.assertEqual(acknowledged.acknowledged_seq, 8)
            finally:
                run.end()


class HarnessTest(ServiceCase):
    def test_a_loop_of_the_trainers_own(self) -> None:
        external = {"kind": "external", "rewrites": "refuse"}
        self.run_.submit([holdfast.Task("agent", [1, 2, 3], {"max_tokens": 6}, id=name, environment=external) for name in ("good", "bad")])
        sessions = {one.task_id: self.run_.session(one.id) for one in self.run_.sessions()}
        good, context = sessions["good"], [1, 2, 3]
        generated: List[int] = []
        for turn in range(3):
            context += [50 + turn, 60]
            if turn % 2:
                made = good.generate(f"turn-{turn}", token_ids=context)
            else:
                made = good.generate(f"turn-{turn}", append_token_ids=[50 + turn, 60], temperature=0.5)
            assert made.logprobs is not None
            self.assertEqual((made.turn, len(made.logprobs), made.repeated), (turn, len(made.token_ids), False))
            again = good.generate(f"turn-{turn}", append_token_ids=[50 + turn, 60])
            self.assertEqual((again.token_ids, again.repeated), (made.token_ids, True))
            context += made.token_ids
            generated += made.token_ids
        with self.assertRaises(holdfast.InvalidRequestError):
            good.generate("rewritten", token_ids=[9, 9, 9])
        good.complete(reward=0.25, detail={"tests": 3})
        asyncio.run(self.break_asynchronously(sessions["bad"].id))
        samples = {one.task_id: one for one in take(2, self.run_.samples(timeout=60))}
        one = samples["good"]
        self.assertEqual((one.status, one.reward, one.score_detail, list(one.token_ids)), ("completed", 0.25, {"tests": 3}, context))
        self.assertEqual([token for token, bit in zip(one.token_ids, one.loss_mask) if bit], generated)
        self.assertEqual((samples["bad"].status, samples["bad"].problem, samples["bad"].reward), ("failed", "the container died", None))
        with self.assertRaises(holdfast.ConflictError):
            good.generate("late")

    async def break_asynchronously(self, session: str) -> None:
        async with AsyncClient(service.shared().url, service.TOKENS["trainer"]) as client:
            made = await client.session(session).generate("a")
            self.assertLessEqual(len(made.token_ids), 6)
            await client.session(session).complete("failed", problem="the container died")


    def test_a_history_that_is_rewritten_becomes_a_sequence_of_its_own(self) -> None:
        self.run_.submit([holdfast.Task("agent", [1, 2, 3], {"max_tokens": 5, "ignore_eos": True}, environment={"kind": "external"})])
        (info,) = self.run_.sessions()
        session = self.run_.session(info.id)
        first = session.generate("turn-0")
        context = [1, 2, 3, *first.token_ids]
        second = session.generate("turn-1", token_ids=context[:5] + [70, 71])  # what was said is cut short and summed up
        experts = array("h", range(6))
        session.put_columns(holdfast.Column.of("experts", experts), holdfast.Column("scale", "float32", [], "AACAPw=="))
        with self.assertRaisesRegex(holdfast.InvalidRequestError, "columns"):
            session.put_columns(holdfast.Column("short", "int32", [2], "AAAAAA=="))
        session.complete(reward=1.0)
        sample = next(self.run_.samples(timeout=60))
        columns = {one.name: one for one in sample.columns}
        self.assertEqual((columns["experts"].dtype, columns["experts"].shape, columns["experts"].to_bytes()), ("int16", [6], experts.tobytes()))
        self.assertEqual((columns["scale"].shape, columns["scale"].to_bytes()), ([], b"\0\0\x80?"))
        self.assertEqual([list(one.token_ids) for one in sample.sequences], [context, context[:5] + [70, 71, *second.token_ids]])
        self.assertEqual([list(one.loss_mask) for one in sample.sequences], [[0] * 3 + [1] * 5, [0] * 7 + [1] * 5])
        self.assertEqual([(one.kept_tokens, one.prompt_count) for one in sample.sequences], [(0, 3), (5, 5)])
        self.assertEqual((sample.usage.rewrites, sample.usage.earlier_tokens, sample.usage.output_tokens), (1, 8, 10))
        with self.assertRaisesRegex(LookupError, "2 sequences"):
            sample.token_ids

    def test_an_openai_library_takes_the_sessions_base_url(self) -> None:
        self.run_.submit([holdfast.Task("agent", {"messages": [{"role": "user", "content": "hello"}]}, {"max_tokens": 5}, environment={"kind": "external"})])
        (info,) = self.run_.sessions()
        body = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        url = self.client.openai_base_url(info.id) + "/chat/completions"
        headers = {"Authorization": "Bearer " + service.TOKENS["trainer"], "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
            said = json.load(answer)
        self.assertEqual((said["object"], said["choices"][0]["message"]["role"]), ("chat.completion", "assistant"))
        self.run_.session(info.id).complete()
        sample = next(self.run_.samples(timeout=60))
        self.assertEqual((sample.status, sum(sample.loss_mask)), ("completed", said["usage"]["completion_tokens"]))


class WeightsTest(ServiceCase):
    def test_a_policy_update_pauses_and_commits(self) -> None:
        begin = self.client.policy().policy_version
        self.run_.submit(service.tasks(2))
        with self.run_.policy_update(begin + 1) as update:
            self.assertEqual((update.state, update.policy_version), ("paused", begin + 1))
            self.assertEqual(self.client.policy().policy_version, begin)
        self.assertEqual(self.client.policy().policy_version, begin + 1)
        newest = self.client.weight_updates()[0]
        self.assertEqual((newest.policy_version, newest.state, newest.mode), (begin + 1, "committed", "abort"))
        self.assertEqual(self.run_.submit(service.tasks(1)).policy_version, begin + 1)
        samples = take(3, self.run_.samples(timeout=60))
        self.assertEqual([one.usable for one in samples], [True] * 3)
        with self.assertRaisesRegex(holdfast.WeightUpdateError, "in force already"):
            with self.run_.policy_update(begin + 1):
                self.fail("a version that is in force is not loaded again")

    def test_a_block_that_fails_leaves_the_old_version(self) -> None:
        begin = self.client.policy().policy_version
        with self.assertRaises(ZeroDivisionError):
            with self.run_.policy_update(begin + 1):
                raise ZeroDivisionError
        self.assertEqual(self.client.policy().policy_version, begin)
        self.assertEqual(self.client.weight_updates()[0].state, "cancelled")
        self.run_.submit(service.tasks(1))
        self.assertTrue(next(self.run_.samples(timeout=60)).usable, "the engines go on")

    def test_a_crash_in_the_block_is_gone_on_from(self) -> None:
        version = self.client.policy().policy_version + 1
        terms = {"mode": "abort", "cache": "reset", "control": "manage", "pause_timeout_seconds": 300.0}
        self.client.call(_calls.begin_weights("default", version, terms))
        with self.another().policy_update(version):
            pass
        self.assertEqual(self.client.policy().policy_version, version)

    def test_announcing(self) -> None:
        version = self.client.policy().policy_version + 1
        self.assertEqual(self.client.put_policy(version).policy_version, version)
        with self.assertRaises(holdfast.ConflictError):
            self.client.put_policy(version - 1)


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


class AsyncTest(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        service.shared()

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    async def test_a_trainers_loop(self) -> None:
        async with AsyncClient(service.shared().url, service.TOKENS["trainer"]) as client:
            run = await client.run("async", contract=service.CONTRACT)
            try:
                await run.submit(service.tasks(6, group_size=2), key="one")
                self.assertTrue((await run.submit(service.tasks(6, group_size=2), key="one")).replayed)
                groups = run.groups(timeout=60)
                taken = [await groups.__anext__() for _ in range(3)]
                await groups.ack()
                cursor = groups.cursor
                again = (await client.run("async")).groups(after=cursor, timeout=60)
                taken += [await again.__anext__() for _ in range(3)]
                self.assertEqual(len({group.task for group in taken}), 6)
                acknowledged = await again.ack()
                assert acknowledged is not None
                self.assertEqual(acknowledged.acknowledged_seq, 12)
                sample = taken[0].samples[0]
                history = await run.session(sample.id).events()
                self.assertEqual((await run.session(sample.id).info()).id, sample.id)
                self.assertEqual(len(await run.session(sample.id).turns()), 1)
                self.assertEqual(history.deliveries[0].consumer, "trainer")
                self.assertEqual((await run.backlog()).total.ended, 12)
                self.assertEqual((await run.metrics(600)).total.samples, 12)
                self.assertEqual((await run.mixture()).total.tv_released_pp, 0.0)
                self.assertEqual((await run.pace()).release_sessions, sum(one.release_sessions for one in (await run.pace()).classes))
                self.assertEqual((await run.session(sample.id).audit()).session.id, sample.id)
                path = Path(service.new_dir()) / "run.jsonl"
                await run.export(path)
                self.assertEqual(len(path.read_text().splitlines()), 12)
                version = (await client.policy()).policy_version + 1
                async with run.policy_update(version):
                    pass
                self.assertEqual((await client.policy()).policy_version, version)
                with self.assertRaises(ZeroDivisionError):
                    async with run.policy_update(version + 1):
                        raise ZeroDivisionError
                self.assertEqual((await client.weight_updates())[0].state, "cancelled")
            finally:
                await run.end()
            rest = [one.seq async for one in run.samples(consumer="")]
            self.assertEqual(rest, list(range(1, 13)))

    async def test_hundreds_of_polls_wait_without_threads(self) -> None:
        polls = 300
        async with AsyncClient(service.shared().url, service.TOKENS["trainer"]) as client:
            run = await client.run("polls", contract=service.CONTRACT)
            try:
                threads = threading.active_count()
                waiting = [asyncio.ensure_future(run.samples(consumer="", timeout=60).__anext__()) for _ in range(polls)]
                await self.until_working(polls)
                self.assertLessEqual(threading.active_count(), threads + 1)
                (batch,) = [await run.submit(service.tasks(1))]
                samples = await asyncio.gather(*waiting)
                self.assertEqual({(one.seq, one.batch) for one in samples}, {(1, batch.id)})
            finally:
                await run.end()

    async def until_working(self, polls: int) -> None:
        """Wait until the service says that it holds so many polls."""

        def working() -> float:
            request = urllib.request.Request(service.shared().url + "/metrics", headers={"Authorization": "Bearer " + service.TOKENS["viewer"]})
            with urllib.request.urlopen(request) as answer:
                lines = answer.read().decode().splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("holdfast_api") and 'kind="wait"' in line and "work" in line.split("{")[0])

        for _ in range(600):
            if await asyncio.get_running_loop().run_in_executor(None, working) >= polls:
                return
            await asyncio.sleep(0.05)
        self.fail("the polls did not arrive")


class InterfaceTest(unittest.TestCase):
    def test_every_field_is_in_the_services_own_description(self) -> None:
        with urllib.request.urlopen(service.shared().url + "/api/v1/openapi.json") as answer:
            schemas = json.load(answer)["components"]["schemas"]
        names = {"RunInfo": "Run", "ContractVersion": "Contract", "SessionInfo": "Session"}
        own: Set[str] = {"History", "TokenArrays", "SamplePage", "_Page"}
        checked = 0
        for cls in vars(documents).values():
            if not isinstance(cls, type) or not dataclasses.is_dataclass(cls) or cls.__name__ in own:
                continue
            schema = schemas[names.get(cls.__name__, cls.__name__)]
            fields = {field.metadata.get("json", field.name) for field in dataclasses.fields(cls) if field.init}
            with self.subTest(cls.__name__):
                self.assertEqual(fields - set(schema["properties"]), set())
                hints = typing.get_type_hints(cls)
                for field in dataclasses.fields(cls):
                    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                    if field.init and required:
                        self.assertIn(field.metadata.get("json", field.name), schema["required"])
                        self.assertNotIn(type(None), typing.get_args(hints[field.name]))
            checked += 1
        self.assertGreater(checked, 20)


if __name__ == "__main__":
    unittest.main()
