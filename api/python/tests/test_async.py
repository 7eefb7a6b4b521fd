"""The client for asyncio, against the real service."""

from __future__ import annotations

import asyncio
import threading
import unittest
import urllib.request
from pathlib import Path

from holdfast.aio import AsyncClient

from . import service


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
                groups = run.groups(timeout=300)
                taken = [await groups.__anext__() for _ in range(3)]
                await groups.ack()
                cursor = groups.cursor
                again = (await client.run("async")).groups(after=cursor, timeout=300)
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
                waiting = [asyncio.ensure_future(run.samples(consumer="", timeout=300).__anext__()) for _ in range(polls)]
                await self.until_working(polls)
                # Those that ask for the figure aside.
                self.assertLess(threading.active_count() - threads, polls // 10)
                (batch,) = [await run.submit(service.tasks(1))]
                samples = await asyncio.gather(*waiting)
                self.assertEqual({(one.seq, one.batch) for one in samples}, {(1, batch.id)})
            finally:
                await run.end()

    async def until_working(self, polls: int) -> None:
        """Wait until the service says that it holds so many polls."""

        def working() -> float:
            request = urllib.request.Request(service.shared().url + "/metrics", headers={"Authorization": "Bearer " + service.TOKENS["viewer"]})
            with urllib.request.urlopen(request, timeout=300) as answer:
                lines = answer.read().decode().splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("holdfast_api") and 'kind="wait"' in line and "work" in line.split("{")[0])

        for _ in range(3000):
            if await asyncio.get_running_loop().run_in_executor(None, working) >= polls:
                return
            await asyncio.sleep(0.05)
        self.fail("the polls did not arrive")


if __name__ == "__main__":
    unittest.main()
