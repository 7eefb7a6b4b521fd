"""Policy updates, against the real service."""

from __future__ import annotations

import unittest

import holdfast
from holdfast import _calls

from . import service
from .case import ServiceCase, take


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
        samples = take(3, self.run_.samples(timeout=300))
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
        self.assertTrue(next(self.run_.samples(timeout=300)).usable, "the engines go on")

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


if __name__ == "__main__":
    unittest.main()
