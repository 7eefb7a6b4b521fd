"""A trainer's own loop, against the real service."""

from __future__ import annotations

import asyncio
import json
import unittest
import urllib.request
from array import array
from typing import List

import holdfast
from holdfast.aio import AsyncClient

from . import service
from .case import ServiceCase, take


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
        samples = {one.task_id: one for one in take(2, self.run_.samples(timeout=300))}
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
        sample = next(self.run_.samples(timeout=300))
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
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as answer:
            said = json.load(answer)
        self.assertEqual((said["object"], said["choices"][0]["message"]["role"]), ("chat.completion", "assistant"))
        self.run_.session(info.id).complete()
        sample = next(self.run_.samples(timeout=300))
        self.assertEqual((sample.status, sum(sample.loss_mask)), ("completed", said["usage"]["completion_tokens"]))


if __name__ == "__main__":
    unittest.main()
