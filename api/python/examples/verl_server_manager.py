"""verl: agent loops as they are, with every turn of theirs made through Holdfast.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_server_manager.HoldfastAgentLoopManager

Where verl_agent_loop.py hands whole trajectories to Holdfast, here verl keeps its loops, tools and rewards, and
Holdfast takes the place of the server manager: it admits, holds, places and records each trajectory as a session.

When is a trajectory over? A server manager is never told: it is asked for one turn after another under a
request id. The agent loop's worker knows, since it runs one trajectory in one call of _run_agent_loop. So the
worker is replaced as well: what is generated within that call belongs to one trajectory, which ends with it, as
completed with the loop's reward, or as failed with the loop's error. What is generated outside of any such call
ends when nothing more is asked for in IDLE_SECONDS, and then counts as failed.

Follows verl.experimental.agent_loop of 2026: AgentLoopWorker keeps a server_manager that it finds, calls its
generate(request_id, *, prompt_ids, sampling_params, ...) -> TokenOutput, and runs each row in a task of its own.
Tested against a stub of that interface, not against verl itself. Text only: images and videos are refused.
Register verl's engines in the pool with control "observe", since verl changes their weights itself.
HOLDFAST_URL, HOLDFAST_POOL, HOLDFAST_RUN, HOLDFAST_CLASS and HOLDFAST_CONCURRENCY say where.
"""

import asyncio
import contextvars
import os
from contextlib import asynccontextmanager

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.workers.rollout.replica import TokenOutput

import holdfast
from holdfast.aio import AsyncClient

IDLE_SECONDS = 1800
CONSUMER = "verl"

_current = contextvars.ContextVar("trajectory")


class Trajectory:
    """The sessions of one call of _run_agent_loop, by request id: one, unless the loop branches."""

    def __init__(self):
        self.sessions, self.turns, self.reward = {}, {}, None


class HoldfastServerManager:
    """Makes turns in sessions; for one event loop, that of its worker."""

    def __init__(self, config):
        self._rollout, self._run = config.actor_rollout_ref.rollout, None
        self._pool, self._class = os.environ.get("HOLDFAST_POOL", "default"), os.environ.get("HOLDFAST_CLASS", "agent")
        self._loose, self._opening = Trajectory(), asyncio.Lock()

    async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, **_):
        if image_data or video_data:
            raise NotImplementedError("Holdfast takes text only")
        trajectory, sampling = _current.get(self._loose), self._sampling(sampling_params)
        if request_id not in trajectory.sessions:
            trajectory.sessions[request_id] = await self._open(request_id, prompt_ids)
        number = trajectory.turns[request_id] = trajectory.turns.get(request_id, -1) + 1
        turn = await trajectory.sessions[request_id].generate(f"{request_id}-{number}", token_ids=prompt_ids, **sampling)
        versions = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), turn.policy_version)
        log_probs = None if turn.logprobs is None else list(turn.logprobs)
        return TokenOutput(token_ids=list(turn.token_ids), log_probs=log_probs, stop_reason="completed", extra_fields=versions)

    @asynccontextmanager
    async def trajectory(self):
        """What is generated in the block is one trajectory, and over when the block is."""
        trajectory = Trajectory()
        token = _current.set(trajectory)
        try:
            yield trajectory
        except BaseException as error:
            # Also when the row is cancelled: its sessions must not wait to be idle.
            await asyncio.shield(self._end(trajectory, "failed", problem=repr(error)[:4000]))
            raise
        else:
            await self._end(trajectory, "completed", reward=trajectory.reward)
        finally:
            _current.reset(token)

    async def begin_step(self, step):
        """verl has put the step's weights into its engines."""
        run = await self._opened()
        if (await run.client.policy(self._pool)).policy_version < step:
            await run.client.put_policy(step, self._pool)

    async def drain(self):
        """Acknowledge what has ended: verl has it already, and what nobody acknowledges would pile up."""
        ended = (await self._opened()).samples(timeout=0, encoding="none")
        async for _ in ended:
            pass
        await ended.ack()

    async def close(self):
        if self._run is not None:
            await self._run.client.close()

    async def _opened(self):
        async with self._opening:
            if self._run is None:
                contract = holdfast.Contract({self._class: 1.0}, max_concurrency=int(os.environ.get("HOLDFAST_CONCURRENCY", "256")))
                self._run = await AsyncClient().run(os.environ.get("HOLDFAST_RUN", "verl"), pool=self._pool, contract=contract, consumer=CONSUMER)
        return self._run

    async def _open(self, request_id, prompt_ids):
        run, environment = await self._opened(), {"kind": "external", "idle_seconds": IDLE_SECONDS}
        task = holdfast.Task(self._class, list(prompt_ids), {"max_tokens": self._rollout.response_length}, id=request_id, environment=environment)
        batch = await run.submit([task], key=request_id)
        async for session in run.sessions(batch=batch.id):
            return run.session(session.id)
        raise RuntimeError(f"batch {batch.id} has no session")

    @staticmethod
    async def _end(trajectory, status, **end):
        for session in trajectory.sessions.values():
            await session.complete(status, **end)

    def _sampling(self, given):
        for name, neutral in (("repetition_penalty", (None, 1.0)), ("top_k", (None, -1, 0)), ("min_p", (None, 0.0))):
            if given.get(name) not in neutral:
                raise ValueError(f"sampling parameter {name}={given[name]!r}: not served by Holdfast")
        sampling = {name: given[name] for name in ("temperature", "top_p", "seed", "stop_token_ids") if given.get(name) is not None}
        limit = given.get("max_tokens", given.get("max_new_tokens"))
        sampling["max_tokens"] = self._rollout.response_length if limit is None else limit
        return sampling


class HoldfastAgentLoopWorker(AgentLoopWorker):
    def __init__(self, config, *args, **kwargs):
        self.server_manager = HoldfastServerManager(config)  # kept: verl makes one only where there is none
        super().__init__(config, *args, **kwargs)

    async def generate_sequences(self, batch):
        await self.server_manager.begin_step(batch.meta_info.get("global_steps", 0))
        try:
            return await super().generate_sequences(batch)
        finally:
            await self.server_manager.drain()

    async def _run_agent_loop(self, *args, **kwargs):
        async with self.server_manager.trajectory() as trajectory:
            output = await super()._run_agent_loop(*args, **kwargs)
            trajectory.reward = getattr(output, "reward_score", None)
            return output


class HoldfastAgentLoopManager(AgentLoopManager):
    def __init__(self, config, *args, **kwargs):
        self.agent_loop_workers_class = ray.remote(HoldfastAgentLoopWorker)
        super().__init__(config, *args, **kwargs)
