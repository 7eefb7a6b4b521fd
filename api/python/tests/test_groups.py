"""Groups out of any interleaving, with crashes anywhere: none lost, none twice."""

from __future__ import annotations

import random
import unittest
from datetime import datetime, timedelta, timezone
from typing import Dict, List, Optional, Set

import holdfast
from holdfast.documents import Consumer, Sample, SessionInfo
from holdfast.groups import GroupBook, Position

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


def samples_of(order: List[str], sizes: Dict[str, int]) -> List[Sample]:
    """Samples in completion order, each named after its task."""
    seen: Dict[str, int] = {}
    samples = []
    for seq, task in enumerate(order, 1):
        member = seen.get(task, 0)
        seen[task] = member + 1
        samples.append(Sample(
            f"{task}/{member}", seq, f"c{seq}", "r", "b", task, task, member, sizes[task], "rlvr", "completed", released_at=EPOCH))
    return samples


class World:
    """The service's side: what is in order, and what the consumer acknowledged."""

    def __init__(self, order: List[str], sizes: Dict[str, int]) -> None:
        self.samples, self.sizes, self.acked, self.asked = samples_of(order, sizes), sizes, 0, 0

    def consumer(self) -> Optional[Consumer]:
        return Consumer("r", "c", "", 0, f"c{self.acked}", self.acked, EPOCH + timedelta(seconds=1)) if self.acked else None

    def members(self, task: str, up_to: int) -> List[SessionInfo]:
        """The task's sessions; those that complete after ``up_to`` have no place yet."""
        self.asked += 1
        return [
            SessionInfo("s", "r", "p", "b", task, task, one.member, one.group_size, "rlvr", sample_seq=one.seq if one.seq <= up_to else 0)
            for one in self.samples if one.task == task
        ]

    def page(self, book: GroupBook, begin: int, end: int) -> List[holdfast.Group]:
        """Give a book the samples after ``begin`` up to ``end``."""
        page = self.samples[begin:end]
        for task in book.doubtful(page):
            book.settle(task, self.members(task, end))
        return [group for group in map(book.add, page) if group is not None]


def place(cursor: str) -> int:
    return int(cursor[1:]) if cursor else 0


class GroupBookTest(unittest.TestCase):
    def test_the_place_stops_before_the_first_sample_not_handed_out(self) -> None:
        world = World(list("abacbc"), {"a": 2, "b": 2, "c": 2})
        book = GroupBook(None, None)
        self.assertEqual(world.page(book, 0, 2), [])
        self.assertEqual((book.position(), book.open), (Position("", 0, {}), 2))
        (a,) = world.page(book, 2, 3)
        self.assertEqual([one.id for one in a.samples], ["a/0", "a/1"])
        self.assertEqual(book.position(), Position("", 0, {}), "complete, but not handed out")
        book.hand(a)
        self.assertEqual(book.position(), Position("c1", 1, {"a": 1}))
        b, c = world.page(book, 3, 6)
        book.hand(b)
        self.assertEqual(book.position(), Position("c3", 3, {"b": 1}))
        book.hand(c)
        self.assertEqual(book.position(), Position("c6", 6, {}))
        self.assertEqual(book.open, 0)

    def test_members_are_in_order_whatever_the_order_of_completion(self) -> None:
        first, second = samples_of(["a", "a"], {"a": 2})
        book = GroupBook(None, None)
        self.assertIsNone(book.add(second))
        group = book.add(first)
        assert group is not None
        self.assertEqual([one.member for one in group.samples], [0, 1])

    def test_unusable_members_complete_a_group(self) -> None:
        samples = samples_of(["a", "a", "a"], {"a": 3})
        samples[1].status = "failed"
        book = GroupBook(None, None)
        group = [book.add(one) for one in samples][-1]
        assert group is not None
        self.assertEqual([one.id for one in group.usable], ["a/0", "a/2"])

    def test_a_position_behind_the_acknowledged_place_is_refused(self) -> None:
        consumer = Consumer("r", "c", "c9", 9, "c5", 5, EPOCH)
        with self.assertRaisesRegex(holdfast.PositionError, "at sample 4.*up to 5"):
            GroupBook(Position("c4", 4), consumer)
        self.assertEqual(GroupBook(Position("c6", 6), consumer).cursor, "c6")
        self.assertEqual(GroupBook(None, consumer).cursor, "c5")

    def test_tasks_released_after_the_last_move_are_not_asked_about(self) -> None:
        world = World(list("ab"), {"a": 2, "b": 2})
        world.acked = 1
        book = GroupBook(None, world.consumer())
        late = samples_of(["b"], {"b": 2})
        late[0].released_at = EPOCH + timedelta(seconds=2)
        self.assertEqual(book.doubtful(late), [])
        late[0].released_at = EPOCH
        self.assertEqual(book.doubtful(late), ["b"])

    def test_any_interleaving_with_crashes(self) -> None:
        for seed in range(400):
            for keeps_position in (True, False):
                with self.subTest(seed=seed, keeps_position=keeps_position):
                    self.one_history(random.Random(seed), keeps_position)

    def one_history(self, rng: random.Random, keeps_position: bool) -> None:
        """A trainer reads pages, takes groups, makes them durable, acknowledges, and crashes in between."""
        sizes = {f"t{i}": rng.randint(1, 4) for i in range(rng.randint(1, 8))}
        order = [task for task, size in sizes.items() for _ in range(size)]
        rng.shuffle(order)
        world = World(order, sizes)
        durable: List[str] = []  # groups in the trainer's checkpoint
        position: Optional[Position] = None
        for life in range(30):
            book = GroupBook(position, world.consumer())
            at = max(place(book.cursor), world.acked)
            self.assertEqual(at, place(book.cursor))
            ready: List[holdfast.Group] = []
            handed: List[str] = []
            crashes = life < 8
            for _ in range(1000):
                if crashes and rng.random() < 0.1:
                    break
                if rng.random() < 0.6 and at < len(order):
                    step = rng.randint(1, 4)
                    ready += world.page(book, at, min(at + step, len(order)))
                    at = min(at + step, len(order))
                elif ready and rng.random() < 0.7:
                    group = ready.pop(0)
                    book.hand(group)
                    handed.append(group.task)
                else:
                    # Durable first, then acknowledged; a crash may come in between.
                    now = book.position()
                    durable += handed
                    handed = []
                    position = Position.from_json(now.to_json()) if keeps_position else None
                    if not (crashes and rng.random() < 0.3):
                        world.acked = max(world.acked, now.seq)
                if at == len(order) and not ready and not handed and world.acked == len(order):
                    break
            if world.acked == len(order):
                break
        self.assertEqual(world.acked, len(order), "everything is acknowledged in the end")
        self.assertEqual(set(durable), set(sizes), "no group is lost")
        if keeps_position:
            self.assertEqual(sorted(durable), sorted(set(durable)), "no group twice")
            self.assertEqual(world.asked, 0)

    def test_without_a_position_only_groups_wholly_beyond_the_place_come_again(self) -> None:
        world = World(list("aabcbcdd"), {"a": 2, "b": 2, "c": 2, "d": 2})
        book = GroupBook(None, None)
        for group in world.page(book, 0, 8):
            if group.task != "c":
                book.hand(group)
        world.acked = book.position().seq
        self.assertEqual(world.acked, 3)  # a, and the first of b
        again: Set[str] = set()
        book = GroupBook(None, world.consumer())
        for group in world.page(book, 3, 8):
            again.add(group.task)
            book.hand(group)
        self.assertEqual(again, {"c", "d"})
        self.assertEqual((book.position().seq, book.open), (8, 0))


if __name__ == "__main__":
    unittest.main()
