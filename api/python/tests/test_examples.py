"""The examples, run against the real service; frameworks are stubs of what the adapters use of them."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import types
import unittest
import urllib.request
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import holdfast
from holdfast import _calls
from holdfast.aio import AsyncClient

from . import service

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def stub_modules(**contents: Dict[str, Any]) -> Any:
    """Put modules in place for a while; a double underscore in a name stands for a dot."""
    modules: Dict[str, types.ModuleType] = {}
    for given, members in contents.items():
        pieces = given.split("__")
        for i in range(1, len(pieces) + 1):
            name = ".".join(pieces[:i])
            modules.setdefault(name, types.ModuleType(name))
        vars(modules[".".join(pieces)]).update(members)
    return mock.patch.dict(sys.modules, modules)


def load(name: str) -> Any:
    """Import an example by its path."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tokenizer:
    """Letters as token ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> List[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: List[int]) -> str:
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages: List[Dict[str, str]], **_: Any) -> List[int]:
        return self.encode("".join(message["content"] for message in messages))


class ExampleCase(unittest.TestCase):
    def setUp(self) -> None:
        self.client = service.client()
        self.addCleanup(self.client.close)
        self.name = f"example-{type(self).__name__}"
        environment = {"HOLDFAST_URL": service.shared().url, "HOLDFAST_TOKEN": service.TOKENS["trainer"], "HOLDFAST_RUN": self.name}
        patched = mock.patch.dict(os.environ, environment)
        patched.start()
        self.addCleanup(patched.stop)
        self.addCleanup(self.end_runs)

    def end_runs(self) -> None:
        for run in self.client.call(_calls.active_runs("default")):
            self.client.open_run(run.id).end()


class PlainLoopTest(ExampleCase):
    def test_it_goes_on_from_its_checkpoint(self) -> None:
        checkpoint = Path(service.new_dir()) / "checkpoint.json"

        def run(steps: int) -> Dict[str, Any]:
            environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
            subprocess.run([sys.executable, str(EXAMPLES / "plain_loop.py"), str(checkpoint), str(steps)], env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL)
            state: Dict[str, Any] = json.loads(checkpoint.read_text())
            return state

        first = run(1)
        # The step was done, and the trainer died before it was written down.
        state = run(2)
        checkpoint.write_text(json.dumps(first))
        place = {one.consumer: one for one in self.client.run("plain-loop").consumers()}["trainer"]
        self.assertEqual((state["step"], place.acknowledged_seq, place.acknowledged), (2, 64, state["cursor"]))
        self.assertEqual(run(2), state, "from an older checkpoint the step comes out the same")


class SlimeTest(ExampleCase):
    def test_a_rollout(self) -> None:
        class Status(enum.Enum):
            PENDING, COMPLETED, TRUNCATED, FAILED = range(4)

        @dataclasses.dataclass
        class Sample:
            group_index: int
            prompt: str
            tokens: List[int] = dataclasses.field(default_factory=list)
            response: str = ""
            response_length: int = 0
            reward: Any = None
            loss_mask: Any = None
            weight_versions: List[str] = dataclasses.field(default_factory=list)
            rollout_log_probs: Any = None
            status: Status = Status.PENDING

        setattr(Sample, "Status", Status)

        @dataclasses.dataclass
        class RolloutFnTrainOutput:
            samples: List[List[Sample]]
            metrics: Any = None

        async def batched_async_rm(args: Any, samples: List[Sample]) -> List[float]:
            return [float(len(sample.response.split())) for sample in samples]

        class Buffer:
            def __init__(self) -> None:
                self.drawn = 0
                self.returned: List[List[Sample]] = []

            def get_samples(self, count: int) -> List[List[Sample]]:
                groups = [[Sample(self.drawn + i, f"prompt {self.drawn + i}") for _ in range(2)] for i in range(count)]
                self.drawn += count
                return groups

            def add_samples(self, groups: List[List[Sample]]) -> None:
                self.returned += groups

        class Spoilt(Buffer):
            def get_samples(self, count: int) -> List[List[Sample]]:
                groups = super().get_samples(count)
                for sample in groups[1] if count == 3 else ():
                    sample.prompt = "x" * 150_000  # more than an engine's context: the service fails it
                return groups

        args = types.SimpleNamespace(
            rollout_batch_size=3, hf_checkpoint="m", rollout_max_response_len=8, rollout_temperature=1.0, rollout_top_p=1.0,
            sglang_server_concurrency=16)
        with stub_modules(
            slime__rollout__base_types={"RolloutFnTrainOutput": RolloutFnTrainOutput}, slime__rollout__rm_hub={"batched_async_rm": batched_async_rm},
            slime__utils__processing_utils={"load_tokenizer": lambda *_, **__: Tokenizer()}, slime__utils__types={"Sample": Sample},
        ):
            module = load("slime_rollout")
        version = self.client.policy().policy_version + 1
        buffer = Buffer()
        output = module.generate_rollout(args, version, buffer)
        self.assertEqual(self.client.policy().policy_version, version)
        self.assertEqual([len(group) for group in output.samples], [2, 2, 2])
        for group in output.samples:
            for sample in group:
                self.assertEqual(sample.tokens[: -sample.response_length], [ord(letter) for letter in sample.prompt])
                self.assertEqual((len(sample.loss_mask), len(sample.rollout_log_probs)), (sample.response_length,) * 2)
                self.assertEqual((sample.reward, sample.weight_versions), (float(sample.response_length), [str(version)]))
                self.assertIn(sample.status, (Status.COMPLETED, Status.TRUNCATED))
        # The same rollout again, as after a crash: the same samples, though they were acknowledged.
        again = module.generate_rollout(args, version, Buffer())
        self.assertEqual(again.samples, output.samples)
        self.assertEqual(self.client.run(self.name).backlog().total.released, 6)
        self.assertNotEqual(module.generate_rollout(args, version + 1, buffer).samples[0], output.samples[0])
        self.assertEqual(buffer.returned, [])
        # A group with a failed member goes back as it was, and another takes its place.
        spoilt = Spoilt()
        output = module.generate_rollout(args, version + 2, spoilt)
        self.assertEqual([group[0].group_index for group in output.samples], [0, 2, 3])
        self.assertEqual(output.metrics, {"rollout/holdfast_spoilt_groups": 1})
        (returned,) = spoilt.returned
        self.assertEqual([(sample.group_index, sample.status, sample.tokens) for sample in returned], [(1, Status.PENDING, [])] * 2)


class VerlTest(ExampleCase):
    def test_a_step(self) -> None:
        @dataclasses.dataclass
        class AgentLoopMetrics:
            generate_sequences: float = 0.0
            tool_calls: float = 0.0

        @dataclasses.dataclass
        class AgentLoopOutput:
            prompt_ids: List[int]
            response_ids: List[int]
            response_mask: List[int]
            metrics: AgentLoopMetrics
            response_logprobs: Any = None
            reward_score: Any = None
            num_turns: int = 0
            extra_fields: Dict[str, Any] = dataclasses.field(default_factory=dict)

        class AgentLoopWorker:
            def __init__(self, config: Any) -> None:
                self.config, self.tokenizer, self.rollout_config = config, Tokenizer(), config.actor_rollout_ref.rollout

            async def _agent_loop_postprocess(self, output: AgentLoopOutput, validate: bool, **kwargs: Any) -> AgentLoopOutput:
                output.extra_fields["raw_prompt"] = kwargs["raw_prompt"]
                return output

            def _postprocess(self, outputs: Any, input_non_tensor_batch: Any = None, validate: bool = False) -> Any:
                return outputs

        class AgentLoopManager:
            def __init__(self, config: Any) -> None:
                self.worker = getattr(self, "agent_loop_workers_class")(config)

        class Batch:
            def __init__(self, rows: int, **meta: Any) -> None:
                self.meta_info = meta
                self.non_tensor_batch: Dict[str, List[Any]] = {
                    "raw_prompt": [[{"role": "user", "content": f"question {i // 2}"}] for i in range(rows)],
                    "uid": [f"u{i // 2}" for i in range(rows)], "agent_name": ["holdfast"] * rows,
                }

            def __len__(self) -> int:
                return len(self.non_tensor_batch["uid"])

        rollout = types.SimpleNamespace(
            temperature=1.0, top_p=1.0, prompt_length=64, response_length=8, agent=types.SimpleNamespace(num_workers=1),
            val_kwargs=types.SimpleNamespace(temperature=0.0, top_p=1.0))
        config = types.SimpleNamespace(actor_rollout_ref=types.SimpleNamespace(rollout=rollout), data={})
        with stub_modules(ray={"remote": lambda cls: cls}, verl__experimental__agent_loop__agent_loop={
            "AgentLoopManager": AgentLoopManager, "AgentLoopMetrics": AgentLoopMetrics, "AgentLoopOutput": AgentLoopOutput, "AgentLoopWorker": AgentLoopWorker,
        }):
            module = load("verl_agent_loop")
        worker = module.HoldfastAgentLoopManager(config).worker
        version = self.client.policy().policy_version + 1
        outputs = asyncio.run(worker.generate_sequences(Batch(6, global_steps=version)))
        self.assertEqual(len(outputs), 6)
        for i, output in enumerate(outputs):
            self.assertEqual(output.prompt_ids, [ord(letter) for letter in f"question {i // 2}"])
            count = len(output.response_ids)
            self.assertEqual((output.response_mask, len(output.response_logprobs), output.num_turns), ([1] * count, count, 2))
            self.assertEqual(output.extra_fields["raw_prompt"][0]["content"], f"question {i // 2}")
            self.assertEqual(output.extra_fields["min_global_steps"], version)
        again = asyncio.run(worker.generate_sequences(Batch(6, global_steps=version)))
        self.assertEqual(again, outputs, "a repeated step gets the same trajectories")
        self.assertEqual(len(asyncio.run(worker.generate_sequences(Batch(4, global_steps=version, validate=True)))), 4)
        self.assertEqual(self.client.run(self.name).backlog().total.released, 10)
        rollout.prompt_length = 200_000
        hopeless = Batch(1, global_steps=version)
        hopeless.non_tensor_batch["raw_prompt"] = [[{"role": "user", "content": "x" * 150_000}]]
        with self.assertRaisesRegex(RuntimeError, "1 rows have no usable sample"):
            asyncio.run(worker.generate_sequences(hopeless))
        rollout.agent.num_workers = 8
        with self.assertRaisesRegex(ValueError, "num_workers=1"):
            module.HoldfastAgentLoopManager(config)


class VerlServerManagerTest(ExampleCase):
    def test_loops_of_verls_own(self) -> None:
        @dataclasses.dataclass
        class TokenOutput:
            token_ids: List[int]
            log_probs: Any = None
            stop_reason: Any = None
            extra_fields: Dict[str, Any] = dataclasses.field(default_factory=dict)

        class AgentLoopWorker:
            server_manager: Any

            def __init__(self, config: Any) -> None:
                self.config = config
                assert hasattr(self, "server_manager"), "verl would make its own"

            async def generate_sequences(self, batch: Any) -> List[Any]:
                rows = [asyncio.create_task(self._run_agent_loop({"temperature": 1.0, "repetition_penalty": 1.0, "logprobs": True}, i, agent_name=name))
                        for i, name in enumerate(batch.names)]
                outputs: List[Any] = await asyncio.gather(*rows, return_exceptions=True)
                return outputs

            async def _run_agent_loop(self, sampling: Dict[str, Any], trajectory: int, *, agent_name: str) -> Any:
                """Three turns with a tool's answer between them, as verl's own loops do it."""
                request, context, mask = f"{agent_name}-{trajectory}", [1, 2, 3 + trajectory], []
                for turn in range(3):
                    output = await self.server_manager.generate(request, prompt_ids=list(context), sampling_params=dict(sampling))
                    if agent_name == "broken" and turn == 1:
                        raise KeyError("the tool is gone")
                    context += [*output.token_ids, 7, 8]
                    mask += [1] * len(output.token_ids) + [0, 0]
                    assert len(output.log_probs) == len(output.token_ids)
                return types.SimpleNamespace(context=context[:-2], mask=mask[:-2], reward_score=0.5, extra_fields=output.extra_fields)

        class AgentLoopManager:
            def __init__(self, config: Any) -> None:
                self.worker = getattr(self, "agent_loop_workers_class")(config)

        config = types.SimpleNamespace(actor_rollout_ref=types.SimpleNamespace(rollout=types.SimpleNamespace(response_length=6)))
        with stub_modules(
            ray={"remote": lambda cls: cls}, verl__workers__rollout__replica={"TokenOutput": TokenOutput},
            verl__experimental__agent_loop__agent_loop={"AgentLoopManager": AgentLoopManager, "AgentLoopWorker": AgentLoopWorker},
        ):
            module = load("verl_server_manager")
        version = self.client.policy().policy_version + 1

        async def step() -> Any:
            worker = module.HoldfastAgentLoopManager(config).worker
            outputs = await worker.generate_sequences(types.SimpleNamespace(names=["tools", "broken", "tools"], meta_info={"global_steps": version}))
            with self.assertRaisesRegex(ValueError, "top_k=5"):
                await worker.server_manager.generate("loose", prompt_ids=[1], sampling_params={"top_k": 5})
            async with AsyncClient(retry=holdfast.RetryPolicy(deadline_seconds=120)) as client:
                ended = (await client.run(self.name)).samples(consumer="", timeout=300, encoding="none")
                for _ in outputs:
                    await ended.__anext__()
            await worker.server_manager.drain()
            await worker.server_manager.close()
            return outputs

        outputs = asyncio.run(step())
        self.assertIsInstance(outputs[1], KeyError)
        run = self.client.run(self.name)
        samples = {one.task_id: one for one in run.samples(consumer="", timeout=0)}
        for i in (0, 2):
            sample = samples[f"tools-{i}"]
            self.assertEqual((sample.status, sample.reward, sample.usage.turns, sample.min_policy_version), ("completed", 0.5, 3, version))
            self.assertEqual(list(sample.token_ids), outputs[i].context)
            self.assertEqual(list(sample.loss_mask), [0, 0, 0] + outputs[i].mask)
            self.assertEqual(outputs[i].extra_fields["max_global_steps"], version)
        self.assertEqual((samples["broken-1"].status, samples["broken-1"].reward), ("failed", None))
        self.assertIn("the tool is gone", samples["broken-1"].problem)
        place = {one.consumer: one for one in run.consumers()}["verl"]
        self.assertEqual(place.acknowledged_seq, 3)


class NeMoGymTest(ExampleCase):
    TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}}]

    def test_rollouts_are_sessions(self) -> None:
        class Body:
            def __init__(self, messages: List[Dict[str, Any]], tools: Any) -> None:
                self.members: Dict[str, Any] = {"messages": messages, "tools": tools, "max_completion_tokens": 8, "metadata": {}}

            def model_dump(self, exclude_unset: bool = False) -> Dict[str, Any]:
                return dict(self.members)

        class NeMoGymAsyncOpenAI:
            def __init__(self, base_url: str, api_key: str) -> None:
                self.base_url, self.api_key = base_url, api_key

            async def create_chat_completion(self, **body: Any) -> Any:
                headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
                request = urllib.request.Request(f"{self.base_url}/chat/completions", json.dumps(body).encode(), headers)

                def send() -> Any:
                    with urllib.request.urlopen(request, timeout=300) as answer:
                        return json.load(answer)

                return await asyncio.get_running_loop().run_in_executor(None, send)

        @dataclasses.dataclass
        class VLLMModelConfig:
            base_url: List[str]
            api_key: str
            model: str = "policy"
            return_token_id_information: bool = False
            request_prompt_and_generation_token_ids: bool = False

        class VLLMModel:
            def __init__(self, config: Any) -> None:
                self.config = config
                self.model_post_init(None)

            def model_post_init(self, context: Any) -> None:
                pass

            def _resolve_client(self, request: Any) -> Any:
                raise NotImplementedError

            async def chat_completions(self, request: Any, body: Body) -> Any:
                members = {**body.model_dump(exclude_unset=True), "model": self.config.model}
                if self.config.return_token_id_information:
                    members.update(logprobs=True, top_logprobs=0, return_tokens_as_token_ids=True)
                    members["return_token_ids"] = self.config.request_prompt_and_generation_token_ids
                answer = await self._resolve_client(request).create_chat_completion(**members)
                choice = answer["choices"][0]
                if self.config.return_token_id_information:
                    assert choice["token_ids"] == [int(one["token"][len("token_id:"):]) for one in choice["logprobs"]["content"]]
                    shown.append((answer["prompt_token_ids"], choice["token_ids"]))
                message = types.SimpleNamespace(content=choice["message"]["content"], tool_calls=choice["message"].get("tool_calls"))
                return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)])

        with stub_modules(
            nemo_gym__openai_utils={"NeMoGymAsyncOpenAI": NeMoGymAsyncOpenAI}, nemo_gym__server_utils={"SESSION_ID_KEY": "session_id"},
            responses_api_models__vllm_model__app={"VLLMModel": VLLMModel, "VLLMModelConfig": VLLMModelConfig},
        ):
            module = load("nemo_gym_model")
            module.HoldfastModelConfig = dataclasses.dataclass(module.HoldfastModelConfig)

        shown: "List[tuple[List[int], List[int]]]" = []

        def config(**given: Any) -> Any:
            return module.HoldfastModelConfig([service.shared().url], service.TOKENS["trainer"], holdfast_run=self.name, **given)

        def ask(rollout: str, *more: Dict[str, Any]) -> "tuple[Any, Body]":
            return types.SimpleNamespace(session={"session_id": rollout}), Body([{"role": "user", "content": "What is in the box?"}, *more], self.TOOLS)

        async def rollouts() -> None:
            users = module.HoldfastModel(config(ends_without_tool_calls=False, rollout_idle_seconds=6.0, return_token_id_information=True))
            first = await users.chat_completions(*ask("users"))
            said = {"role": "assistant", "content": first.choices[0].message.content}
            await users.chat_completions(*ask("users", said, {"role": "user", "content": "And below it?"}))
            simple = module.HoldfastModel(config())
            await asyncio.gather(*(simple.chat_completions(*ask(f"simple-{i}")) for i in range(3)))
            await simple.chat_completions(*ask("simple-0"))
            async with AsyncClient(retry=holdfast.RetryPolicy(deadline_seconds=120)) as client:
                ended = (await client.run(self.name)).samples(consumer="", timeout=300, encoding="none")
                for _ in range(5):
                    await ended.__anext__()
            for model in (users, simple):
                await model._run.client.close()

        asyncio.run(rollouts())
        samples = {one.task_id: one for one in self.client.run(self.name).samples(consumer="", timeout=0)}
        self.assertEqual({name: one.usage.turns for name, one in samples.items()}, {"users-0": 2, "simple-0-0": 1, "simple-1-0": 1, "simple-2-0": 1, "simple-0-1": 1})
        for one in samples.values():
            self.assertEqual((one.status, sum(one.loss_mask)), ("completed", one.usage.output_tokens), one.problem)
        (prompt, said), (longer, answered) = shown
        self.assertEqual(longer[:len(prompt) + len(said)], prompt + said)
        self.assertEqual(list(samples["users-0"].token_ids), longer + answered)


if __name__ == "__main__":
    unittest.main()
