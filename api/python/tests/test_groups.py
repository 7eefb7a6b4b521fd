"""Whole groups out of pages cut anywhere, with crashes anywhere: none lost, none twice."""

from __future__ import annotations

import random
import unittest
from typing import Dict, List, Optional, Tuple

import holdfast
from holdfast.documents import Sample
from holdfast.groups import Gathering


def member(task: str, number: int, place: int, members: int, size: int = 0, status: str = "completed") -> Sample:
    """A sample as the service gives it in the order of whole groups."""
    return Sample(
        f"{task}/{number}", 100 - place, f"c{place}", "r", "b", task, task, number, size or members, "rlvr",
        group_members=members, group_outcome="complete", status=status)


def in_order(sizes: Dict[str, int]) -> List[Sample]:
    """Groups one after the other."""
    samples: List[Sample] = []
    for task, size in sizes.items():
        for number in range(size):
            samples.append(member(task, number, len(samples) + 1, size))
    return samples


def take(gathering: Gathering, samples: List[Sample]) -> List[holdfast.Group]:
    return [group for group in map(gathering.add, samples) if group is not None]


class GatheringTest(unittest.TestCase):
    def test_a_group_has_its_members_and_the_place_after_it(self) -> None:
        gathering, samples = Gathering(), in_order({"a": 2, "b": 3})
        self.assertEqual(take(gathering, samples[:1]), [])
        a, b = take(gathering, samples[1:])
        self.assertEqual([one.id for one in a.samples + b.samples], ["a/0", "a/1", "b/0", "b/1", "b/2"])
        self.assertEqual((a.cursor, b.cursor), ("c2", "c5"))

    def test_spare_and_refilled_members_belong_to_the_group(self) -> None:
        statuses = ("completed", "failed", "completed", "cancelled")
        (group,) = take(Gathering(), [member("a", i, i + 1, 4, 2, status) for i, status in enumerate(statuses)])
        self.assertEqual((group.size, len(group.samples), group.outcome), (2, 4, "complete"))
        self.assertEqual([one.member for one in group.usable], [0, 2])

    def test_signal(self) -> None:
        table: List[Tuple[List[Optional[float]], bool]] = [
            ([1.0, 1.0], True), ([1.0, 0.0], False), ([1.0, None], False), ([1.0], False), ([], False),
        ]
        for rewards, without in table:
            samples = [member("a", i, i + 1, 3) for i in range(3)]
            for sample in samples[len(rewards):]:
                sample.status, sample.reward = "failed", None
            for sample, reward in zip(samples, rewards):
                sample.reward = reward
            (group,) = take(Gathering(), samples)
            self.assertEqual(group.without_signal, without, rewards)

    def test_the_rest_of_a_group_that_was_acknowledged_in_part_is_passed_over(self) -> None:
        (b,) = take(Gathering(), in_order({"a": 3, "b": 2})[1:])
        self.assertEqual((b.task, b.cursor), ("b", "c5"))

    def test_any_cuts_with_crashes(self) -> None:
        for seed in range(400):
            for keeps_cursor in (True, False):
                with self.subTest(seed=seed, keeps_cursor=keeps_cursor):
                    self.one_history(random.Random(seed), keeps_cursor)

    def one_history(self, rng: random.Random, keeps_cursor: bool) -> None:
        """A trainer reads pages, takes groups, makes them durable, acknowledges, and crashes in between."""
        sizes = {f"t{i}": rng.randint(1, 4) for i in range(rng.randint(1, 8))}
        samples = in_order(sizes)
        acknowledged, checkpoint = 0, 0
        durable: List[str] = []  # groups in the trainer's checkpoint
        for life in range(30):
            gathering = Gathering()
            at = place = checkpoint if keeps_cursor else acknowledged
            ready: List[holdfast.Group] = []
            given: List[str] = []
            crashes = life < 8
            while acknowledged < len(samples) and not (crashes and rng.random() < 0.1):
                if rng.random() < 0.6 and at < len(samples):
                    end = min(at + rng.randint(1, 4), len(samples))
                    ready += take(gathering, samples[at:end])
                    at = end
                elif ready and rng.random() < 0.7:
                    group = ready.pop(0)
                    given.append(group.task)
                    place = int(group.cursor[1:])
                else:
                    # Durable first, then acknowledged; a crash may come in between.
                    durable, given, checkpoint = durable + given, [], place
                    if not (crashes and rng.random() < 0.3):
                        acknowledged = max(acknowledged, place)
            if acknowledged == len(samples):
                break
        self.assertEqual(acknowledged, len(samples), "everything is acknowledged in the end")
        self.assertEqual(set(durable), set(sizes), "no group is lost")
        if keeps_cursor:
            self.assertEqual(sorted(durable), sorted(sizes), "no group twice")


if __name__ == "__main__":
    unittest.main()
