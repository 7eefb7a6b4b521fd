"""slime: a custom rollout function that gets its samples from Holdfast.

    --rollout-function-path slime_rollout.generate_rollout

Follows slime's rollout interface of 2026: a function of (args, rollout_id,
data_buffer, evaluation) that returns RolloutFnTrainOutput; samples of
slime.utils.types with tokens, response_length, loss_mask, rollout_log_probs and
weight_versions; rewards from slime.rollout.rm_hub where the service gave none.
Tested against a stub of that interface, not against slime itself.

Register slime's engines in the pool with control "observe", since slime changes
their weights itself. HOLDFAST_URL, HOLDFAST_POOL and HOLDFAST_RUN say where.
Evaluation stays with slime: give --eval-function-path.
"""

import asyncio
import os

import holdfast
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.rm_hub import batched_async_rm
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

TRIES = 4  # batches that one rollout may take; the later ones make up for groups with an unusable member


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    if evaluation:
        raise NotImplementedError("evaluate with slime's own rollout function: --eval-function-path")
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    pool, whole, spoilt = os.environ.get("HOLDFAST_POOL", "default"), [], 0
    with holdfast.Client() as client:
        contract = holdfast.Contract({"rlvr": 1.0}, max_concurrency=args.sglang_server_concurrency)
        run = client.run(os.environ.get("HOLDFAST_RUN", "slime"), pool=pool, contract=contract)
        if client.policy(pool).policy_version < rollout_id:
            client.put_policy(rollout_id, pool)  # slime has put new weights into its engines
        for attempt in range(TRIES):
            groups = data_buffer.get_samples(args.rollout_batch_size - len(whole))
            delivered = collect(run, f"rollout-{rollout_id}-{attempt}", [task_of(args, group, tokenizer) for group in groups])
            for group in groups:
                members = [delivered[str(group[0].group_index), member] for member in range(len(group))]
                if all(one.usable for one in members):
                    whole.append([fill(sample, one, tokenizer) for sample, one in zip(group, members)])
                else:
                    spoilt += 1  # its samples stay as they were: another rollout may draw them
                    data_buffer.add_samples([group])
            if len(whole) == args.rollout_batch_size:
                break
        else:
            raise RuntimeError(f"{spoilt} groups had an unusable member: look at run.sessions() of run {run.id}")
    unscored = [sample for group in whole for sample in group if sample.reward is None]
    for sample, reward in zip(unscored, asyncio.run(batched_async_rm(args, unscored)) if unscored else []):
        sample.reward = reward
    return RolloutFnTrainOutput(samples=whole, metrics={"rollout/holdfast_spoilt_groups": spoilt})


def task_of(args, group, tokenizer):
    prompt = tokenizer.encode(group[0].prompt, add_special_tokens=False)
    sampling = {"max_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature, "top_p": args.rollout_top_p}
    return holdfast.Task("rlvr", prompt, sampling, id=str(group[0].group_index), group_size=len(group))


def collect(run, step, tasks):
    """Release tasks and wait for all their samples, by the trainer's id and the member."""
    batch, delivered = run.submit(tasks, key=holdfast.batch_key(step, tasks)), {}
    # A rollout that is repeated may have acknowledged them: by their batch they come all the same.
    stream = run.samples(batch=batch.id) if batch.replayed else run.samples()
    while len(delivered) < batch.sessions:
        one = next(stream)
        if one.batch == batch.id:
            delivered[one.task_id, one.member] = one
    if not batch.replayed:
        stream.ack()
    return delivered


def fill(sample, one, tokenizer):
    prompt = one.prompt_count
    sample.status = Sample.Status.COMPLETED if one.status == "completed" else Sample.Status.TRUNCATED
    sample.tokens, sample.response_length = list(one.token_ids), len(one.token_ids) - prompt
    sample.response = tokenizer.decode(sample.tokens[prompt:])
    sample.loss_mask, sample.rollout_log_probs = list(one.loss_mask[prompt:]), list(one.logprobs[prompt:])
    sample.weight_versions = [str(segment.policy_version) for segment in one.segments if segment.kind == "generated"]
    sample.reward = one.reward
    return sample
