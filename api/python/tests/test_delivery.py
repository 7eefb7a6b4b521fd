"""Reading and acknowledging samples, across crashes of either side, against the real service."""

from __future__ import annotations

import dataclasses
import threading
import time
import unittest
from typing import Dict, List

import holdfast
from holdfast import _calls

from . import service
from .case import ServiceCase, take


class DeliveryTest(ServiceCase):
    def test_submit_iterate_acknowledge(self) -> None:
        batch = self.run_.submit(service.tasks(6, group_size=2), key="step-1")
        self.assertEqual((batch.tasks, batch.sessions, batch.replayed, batch.idempotency_key), (6, 12, False, "step-1"))
        stream = self.run_.samples(timeout=300, limit=5)
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
        stream = self.run_.samples(timeout=300, limit=4)
        received = [next(stream) for _ in range(7)]
        self.run_.ack(received[3].cursor)
        # The trainer dies here: samples 5 to 7 were received and not acknowledged.
        again = self.another().samples(timeout=300)
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
        groups = self.run_.groups(timeout=300, limit=3)
        taken = [next(groups) for _ in range(5)]
        cursor = groups.cursor
        durable = [group.task for group in taken]
        groups.ack()
        taken_too_late = next(groups)  # received, but the trainer dies before it is durable
        again = self.another().groups(after=cursor, timeout=300)
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
        ended = self.run_.samples(consumer="", timeout=300, encoding="none")
        for policy, statuses, outcome in (
            ("refill", ["completed", "failed", "completed"], "complete"), ("partial", ["completed", "failed"], "partial"),
        ):
            with self.subTest(policy):
                contract = dataclasses.replace(service.CONTRACT, group_policy=policy, group_refills=1 if policy == "refill" else None)
                self.assertEqual(self.run_.put_contract(contract).group_policy, policy)
                task = holdfast.Task("agent", [1, 2], {"max_tokens": 4}, id=policy, group_size=2, environment={"kind": "external"})
                batch = self.run_.submit([task])
                groups = self.run_.groups(timeout=300)
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

    def test_places_to_begin_at_and_one_batch(self) -> None:
        first = self.run_.submit(service.tasks(3))
        begun = take(3, self.run_.samples(timeout=300, encoding="none"))
        late = self.run_.samples(consumer="late", start="now", timeout=0, encoding="none")
        self.assertEqual(list(late), [], "what is there already is not its to read")
        second = self.run_.submit(service.tasks(2))
        self.assertEqual({one.batch for one in take(2, self.run_.samples(batch=second.id, timeout=300, encoding="none"))}, {second.id})
        self.assertEqual([one.id for one in self.run_.samples(batch=first.id, timeout=0, encoding="none")], [one.id for one in begun])
        self.assertEqual({one.batch for one in take(2, self.run_.samples(consumer="late", start="beginning", timeout=300))}, {second.id})
        self.assertEqual({one.consumer: one.start_seq for one in self.run_.consumers()}, {"trainer": 0, "late": 3})
        with self.assertRaises(holdfast.InvalidRequestError):
            next(self.run_.samples(consumer="trainer", batch=first.id))
        self.assertEqual(self.run_.backlog().undelivered, 5)
        self.run_.remove_consumer("late")
        self.assertEqual([one.consumer for one in self.run_.consumers()], ["trainer"])
        with self.assertRaises(holdfast.NotFoundError):
            self.run_.remove_consumer("late")

    def test_packed_equals_json(self) -> None:
        self.run_.submit(service.tasks(3, group_size=2))
        take(6, self.run_.samples(timeout=300))  # only then are the groups whole, which their samples tell
        packed = take(6, self.run_.samples(timeout=300))
        plain = take(6, self.run_.samples(timeout=300, encoding="json"))
        self.assertEqual(packed, plain)
        for one, other in zip(packed, plain):
            self.assertEqual((one.token_ids, one.loss_mask, one.logprobs), (other.token_ids, other.loss_mask, other.logprobs))
        with self.assertRaises(LookupError):
            next(self.run_.samples(timeout=0, encoding="none")).token_ids

    def test_big_samples_in_pages_of_bytes(self) -> None:
        prompt = list(range(1, 100_001))
        tasks = [holdfast.Task("agent", prompt, {"max_tokens": 64, "ignore_eos": True}, id=str(i)) for i in range(3)]
        self.run_.submit(tasks)
        samples = take(3, self.run_.samples(timeout=300, max_bytes=1_000_000))
        for one in samples:
            self.assertEqual((one.status, len(one.token_ids)), ("truncated", 100_064))
            self.assertEqual((list(one.token_ids[:100_000]), sum(one.loss_mask)), (prompt, 64))
        page = self.client.call(_calls.samples(self.run_.id, _calls.SamplesQuery(max_bytes=1_000_000), 0))
        self.assertEqual((len(page.samples), page.more), (1, True))

    def test_a_stream_ends_with_its_run_and_filters(self) -> None:
        self.run_.submit(service.tasks(2))
        begin = time.monotonic()
        stream = self.run_.samples(statuses=["completed", "truncated"], timeout=300)
        first = [next(stream), next(stream)]
        self.run_.submit([holdfast.Task("rlvr", [1], {"max_tokens": 100_000}) for _ in range(3)])
        self.run_.end()
        rest = list(stream)
        self.assertEqual(rest, [], "what ended as cancelled was not asked for")
        self.assertLess(time.monotonic() - begin, 250, "it ends with the run, and not with its own time")
        statuses = [one.status for one in self.run_.samples(consumer="", statuses=["cancelled"])]
        self.assertEqual((len(first), statuses), (2, ["cancelled"] * 3))
        with self.assertRaises(holdfast.RunEndedError):
            self.run_.submit(service.tasks(1))

    def test_threads_share_a_client(self) -> None:
        self.run_.submit(service.tasks(20))
        found: Dict[str, List[int]] = {}

        def read(name: str) -> None:
            found[name] = [one.seq for one in take(20, self.run_.samples(timeout=300, consumer=name, limit=3))]

        threads = [threading.Thread(target=read, args=(f"reader-{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, {f"reader-{i}": list(range(1, 21)) for i in range(8)})


class RestartTest(unittest.TestCase):
    def test_a_stream_goes_on_when_the_service_is_killed(self) -> None:
        with service.client(retry=holdfast.RetryPolicy(deadline_seconds=600, max_delay_seconds=1)) as client:
            run = service.new_run(client)
            try:
                run.submit(service.tasks(4))
                stream = run.samples(timeout=600)
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


if __name__ == "__main__":
    unittest.main()
