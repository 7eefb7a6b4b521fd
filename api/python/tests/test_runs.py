"""Runs, their contracts, batches and figures, against the real service: real HTTP, Postgres and Temporal, simulated engines."""

from __future__ import annotations

import dataclasses
import json
import unittest
from pathlib import Path

import holdfast
from holdfast import _calls

from . import service
from .case import ServiceCase, take


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

    def test_back_pressure(self) -> None:
        contract = self.run_.put_contract(dataclasses.replace(service.CONTRACT, undelivered_limit=4))
        self.assertEqual(contract.undelivered_limit, 4)
        self.run_.submit(service.tasks(4))
        stream = self.run_.samples(timeout=300)
        take(4, stream)
        self.run_.submit(service.tasks(1))
        backlog = self.run_.backlog()
        self.assertEqual((backlog.undelivered, backlog.undelivered_limit, backlog.total.queued), (4, 4, 1))
        self.assertIn("undelivered samples 4 of 4", backlog.total.paused)
        (queued,) = self.run_.sessions(state="queued")
        self.assertIn("undelivered", queued.queue_reason)
        stream.ack()
        self.assertEqual(next(stream).id, queued.id, "what was paused goes on after the acknowledgement")

    def test_the_audit_of_a_session(self) -> None:
        turns = [{"output_tokens": 5, "gap_seconds": 0.01, "append_tokens": 3}] * 3 + [{"output_tokens": 5}]
        task = holdfast.Task("agent", [1, 2, 3], {}, environment={"kind": "replay", "turns": turns, "reward": 0.5}, scorer={"kind": "environment"})
        self.run_.submit([task])
        stream = self.run_.samples(timeout=300)
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
        sample = next(self.run_.samples(timeout=300))
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
        stream = self.run_.samples(timeout=300)
        samples = take(3, stream)
        stream.ack()
        self.assertEqual({one.class_name: one.released for one in self.run_.pace().classes}, {"agent": 0, "rlvr": 3})
        directory = Path(service.new_dir())
        self.run_.export(directory / "run.jsonl", start="available")
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
        sample = next(self.run_.samples(timeout=300))
        self.assertEqual((sample.id, sample.status, sample.usable, sample.reward), (info.id, "cancelled", False, None))
        again = self.client.session(info.id).cancel()
        self.assertEqual((again.status, again.cancel_reason), ("cancelled", "not needed"))


if __name__ == "__main__":
    unittest.main()
