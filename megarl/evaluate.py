"""``megarl eval``: score a Hugging Face checkpoint on held-out prompts with the real engine.

Called by `megarl.train` on each rank of one generator replica; its head scores and writes
``eval.json`` into the run folder.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from megarl.checkpoint import write_atomically
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import decode, eos_id, load_model_tokenizer
from megarl.executors.generator import sample_all, sampling_seed
from megarl.rewards.pool import RewardItem, RewardPool
from megarl.rollout.engine import SampleRequest
from megarl.wiring import Rank, make_engine

logger = logging.getLogger(__name__)

EVAL_FILE = "eval.json"


def evaluate(rank: Rank) -> None:
    """Sample ``eval.n`` responses and one greedy response a prompt, score them, write the result."""
    config = rank.config
    tokenizer = load_model_tokenizer(Path(config.model.path))
    prompts = PromptDataset(Path(config.data.eval_path), tokenizer, config.data).all()
    rank.world.set_status("starting the engine")
    engine = make_engine(rank, load_weights=True)
    n = config.eval.n
    requests = [
        SampleRequest(
            request_id=index * (n + 1) + sample,
            prompt=prompt.tokens,
            max_tokens=config.rollout.max_response_length,
            temperature=config.rollout.temperature if sample < n else 0.0,
            seed=sampling_seed(config.seed, prompt.prompt_id, sample),
            eos_token_id=eos_id(tokenizer),
        )
        for index, prompt in enumerate(prompts)
        for sample in range(n + 1)
    ]
    with rank.tracer.span("testing"):
        samples = sample_all(engine, requests)
    engine.close()
    if rank.world.rank != 0:
        return
    items = [
        RewardItem(
            prompt=prompts[sample.request_id // (n + 1)].text,
            response=decode(tokenizer, sample.tokens),
            answer=prompts[sample.request_id // (n + 1)].answer,
            extra=prompts[sample.request_id // (n + 1)].extra,
            finished=sample.finished,
        )
        for sample in samples
    ]
    pool = RewardPool(
        config.reward.path, config.reward.num_processes, config.reward.timeout_seconds
    )
    try:
        scores = pool.score(items).scores
    finally:
        pool.close()
    is_greedy = [sample.request_id % (n + 1) == n for sample in samples]
    sampled = [score for score, greedy in zip(scores, is_greedy, strict=True) if not greedy]
    greedy = [score for score, greedy in zip(scores, is_greedy, strict=True) if greedy]
    result = {
        "model": config.model.path,
        "prompts": len(prompts),
        "samples_per_prompt": n,
        "accuracy": sum(sampled) / len(sampled),
        "accuracy_greedy": sum(greedy) / len(greedy),
        "response_length_mean": sum(len(sample.tokens) for sample in samples) / len(samples),
    }
    config.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(config.folder / EVAL_FILE, json.dumps(result, indent=1))
    logger.info("accuracy %.4f, greedy %.4f", result["accuracy"], result["accuracy_greedy"])
