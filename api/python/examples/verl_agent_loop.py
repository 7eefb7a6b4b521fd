"""verl: an agent loop manager that gets its trajectories from Holdfast.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_agent_loop.HoldfastAgentLoopManager
    actor_rollout_ref.rollout.agent.num_workers=1

Follows verl.experimental.agent_loop of 2026: AgentLoopManager takes the class of
its workers from agent_loop_workers_class, and AgentLoopWorker turns each
AgentLoopOutput into rows by _agent_loop_postprocess and _postprocess. Tested
against a stub of that interface, not against verl itself.

Only whole trajectories pass here: prompts go out as token ids and come back with
everything that the session generated. verl's server manager is not replaced: it
generates one turn of verl's own loop at a time and is never told that one is over.
Register verl's engines in the pool with control "observe", since verl changes
their weights itself; HOLDFAST_URL, HOLDFAST_POOL and HOLDFAST_RUN say where. One
worker is enough: it only waits.
"""

import os

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

import holdfast
from holdfast.aio import AsyncClient

TRIES = 4  # batches that one step may take; the later ones make up for rows without a usable sample


class HoldfastAgentLoopWorker(AgentLoopWorker):
    async def generate_sequences(self, batch):
        config, validate = self.rollout_config, batch.meta_info.get("validate", False)
        given = config.val_kwargs if validate else config
        sampling = {"temperature": given.temperature, "top_p": given.top_p, "max_tokens": config.response_length}
        step, pool = batch.meta_info.get("global_steps", 0), os.environ.get("HOLDFAST_POOL", "default")
        rows = [{name: column[i] for name, column in batch.non_tensor_batch.items()} for i in range(len(batch))]
        samples = {}
        async with AsyncClient() as client:
            contract = holdfast.Contract({"rlvr": 1.0}, max_concurrency=int(os.environ.get("HOLDFAST_CONCURRENCY", "256")))
            run = await client.run(os.environ.get("HOLDFAST_RUN", "verl"), pool=pool, contract=contract)
            if (await client.policy(pool)).policy_version < step:
                await client.put_policy(step, pool)  # verl has put new weights into its engines
            for attempt in range(TRIES):
                missing = [i for i in range(len(rows)) if i not in samples]
                if missing:
                    samples.update(await self._collect(run, f"{step}-{validate}-{attempt}", rows, missing, sampling))
        if len(samples) < len(rows):
            raise RuntimeError(f"{len(rows) - len(samples)} rows have no usable sample: look at the sessions of run {run.id}")
        outputs = []
        for i, row in enumerate(rows):
            kwargs = {name: value for name, value in row.items() if name not in ("agent_name", "__do_sample__")}
            outputs.append(await self._agent_loop_postprocess(self._output(samples[i]), validate, **kwargs))
        return self._postprocess(outputs, input_non_tensor_batch=batch.non_tensor_batch, validate=validate)

    async def _collect(self, run, step, rows, wanted, sampling):
        """Release rows as tasks, those of one prompt as a group; returns usable samples by row."""
        groups = {}
        for i in wanted:
            groups.setdefault(str(rows[i].get("uid", i)), []).append(i)
        tasks = [
            holdfast.Task("rlvr", self._prompt(rows[members[0]]), sampling, id=name, group_size=len(members))
            for name, members in groups.items()
        ]
        batch, samples, seen = await run.submit(tasks, key=holdfast.batch_key(step, tasks)), {}, set()
        # A step that is repeated may have acknowledged them: by their batch they come all the same.
        stream = run.samples(batch=batch.id) if batch.replayed else run.samples()
        while len(seen) < batch.sessions:
            one = await stream.__anext__()
            if one.batch == batch.id:
                seen.add(one.id)
                if one.usable:
                    samples[groups[one.task_id][one.member]] = one
        if not batch.replayed:
            await stream.ack()
        return samples

    def _prompt(self, row):
        kwargs = self.config.data.get("apply_chat_template_kwargs", {})
        ids = self.tokenizer.apply_chat_template(list(row["raw_prompt"]), add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs)
        return ids[-self.rollout_config.prompt_length:]

    def _output(self, one):
        prompt = one.prompt_count
        end = prompt + self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=list(one.token_ids[:prompt]), response_ids=list(one.token_ids[prompt:end]),
            response_mask=list(one.loss_mask[prompt:end]), response_logprobs=list(one.logprobs[prompt:end]),
            reward_score=one.reward, num_turns=2 * one.usage.turns,
            metrics=AgentLoopMetrics(generate_sequences=one.times.residency_seconds, tool_calls=one.times.tool_seconds),
            extra_fields={"min_global_steps": one.min_policy_version, "max_global_steps": one.max_policy_version},
        )


class HoldfastAgentLoopManager(AgentLoopManager):
    def __init__(self, config, *args, **kwargs):
        if config.actor_rollout_ref.rollout.agent.num_workers != 1:
            raise ValueError("set actor_rollout_ref.rollout.agent.num_workers=1: each worker would read every sample")
        self.agent_loop_workers_class = ray.remote(HoldfastAgentLoopWorker)
        super().__init__(config, *args, **kwargs)
