"""NeMo-Gym: a model server whose every rollout is a session of Holdfast.

    policy_model:
      responses_api_models:
        holdfast_model:
          entrypoint: app.py                     # this file, as responses_api_models/holdfast_model/app.py
          base_url: http://127.0.0.1:8080        # Holdfast's, without /v1
          api_key: TOKEN                         # a trainer's token; anything where none is configured
          model: policy
          return_token_id_information: true
          uses_reasoning_parser: false

Follows NeMo-Gym of 2026: a model server is a subclass of SimpleResponsesAPIModel with chat_completions and responses.
VLLMModel has both for a vLLM server, converts between the two, and asks _resolve_client(request) which client serves
the request's session. Here that client is one for the OpenAI-compatible endpoint of a Holdfast session, which admits,
holds, places and records. Tested against a stub of that interface, not against NeMo-Gym itself.

When is a rollout over? A model server is not told: agents and resource servers end rollouts among themselves. The
rule: a rollout is over with a message that calls no tool (a simple agent stops there; ends_without_tool_calls: false
where users answer), and in any case after rollout_idle_seconds without a call, which must be longer than any tool
takes. It then ends as completed. A later call of the same rollout begins another session. Rewards stay with NeMo-Gym,
whose resource servers give them after the last call.

Token ids, masks and log-probabilities of a rollout stand in its sample, whose task_id begins with the rollout's
session id in NeMo-Gym. With return_token_id_information they are in each message as well: the ids are asked for in the
answer itself (request_prompt_and_generation_token_ids), since a prompt that goes on is no rendering of its messages.
"""

import asyncio

from nemo_gym.openai_utils import NeMoGymAsyncOpenAI
from nemo_gym.server_utils import SESSION_ID_KEY
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

import holdfast
from holdfast.aio import AsyncClient

GRACE_SECONDS = 600  # by which Holdfast's own idle limit is later, for rollouts of a model server that died


class HoldfastModelConfig(VLLMModelConfig):
    holdfast_run: str = "nemo-gym"
    holdfast_pool: str = "default"
    holdfast_class: str = "agent"
    holdfast_concurrency: int = 256
    max_output_tokens: int = 4096
    rollout_idle_seconds: float = 300.0
    ends_without_tool_calls: bool = True


class Rollout:
    """A NeMo-Gym session with the Holdfast session that records it now."""

    def __init__(self):
        self.session, self.client, self.count, self.timer, self.calling = None, None, 0, None, asyncio.Lock()


class HoldfastModel(VLLMModel):
    config: HoldfastModelConfig

    def model_post_init(self, context):
        super().model_post_init(context)
        if self.config.return_token_id_information:
            if not hasattr(self.config, "request_prompt_and_generation_token_ids"):
                raise ValueError("return_token_id_information: this NeMo-Gym would render the prompt anew to get its ids; read the samples")
            self.config.request_prompt_and_generation_token_ids = True
        self._rollouts, self._run, self._opening, self._ending = {}, None, asyncio.Lock(), set()

    def _resolve_client(self, request):
        return self._rollouts[request.session[SESSION_ID_KEY]].client

    async def chat_completions(self, request, body):
        name = request.session[SESSION_ID_KEY]
        rollout = self._rollouts.setdefault(name, Rollout())
        async with rollout.calling:  # a session makes one turn at a time
            if rollout.timer is not None:
                rollout.timer.cancel()
            if rollout.session is None:
                await self._open(name, rollout, body.model_dump(exclude_unset=True)["messages"])
            try:
                answer = await super().chat_completions(request, body)
            finally:
                rollout.timer = asyncio.get_running_loop().call_later(self.config.rollout_idle_seconds, self._idle, name, rollout)
            if self.config.ends_without_tool_calls and not answer.choices[0].message.tool_calls:
                await self._end(name, rollout)
            return answer

    async def _open(self, name, rollout, messages):
        async with self._opening:
            if self._run is None:
                contract = holdfast.Contract({self.config.holdfast_class: 1.0}, max_concurrency=self.config.holdfast_concurrency)
                client = AsyncClient(self.config.base_url[0], self.config.api_key)
                self._run = await client.run(self.config.holdfast_run, pool=self.config.holdfast_pool, contract=contract)
        environment = {"kind": "external", "idle_seconds": self.config.rollout_idle_seconds + GRACE_SECONDS}
        task = holdfast.Task(
            self.config.holdfast_class, {"messages": messages}, {"max_tokens": self.config.max_output_tokens},
            id=f"{name}-{rollout.count}", environment=environment)
        batch = await self._run.submit([task], key=task.id)
        async for session in self._run.sessions(batch=batch.id):
            rollout.session, rollout.count = self._run.session(session.id), rollout.count + 1
            base_url = self._run.client.openai_base_url(session.id)
            rollout.client = NeMoGymAsyncOpenAI(base_url=base_url, api_key=self.config.api_key)

    def _idle(self, name, rollout):
        async def end():
            async with rollout.calling:
                await self._end(name, rollout)

        task = asyncio.ensure_future(end())
        self._ending.add(task)  # a task that nobody holds may be collected
        task.add_done_callback(self._ending.discard)

    async def _end(self, name, rollout):
        """The rollout is over, as far as is known: its count stays, so that a later session has a name of its own."""
        if rollout.timer is not None:
            rollout.timer.cancel()
        session, rollout.session, rollout.client, rollout.timer = rollout.session, None, None, None
        if session is not None:
            await session.complete("completed")


if __name__ == "__main__":
    HoldfastModel.run_webserver()
