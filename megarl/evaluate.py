"""``megarl eval``: score a Hugging Face checkpoint on held-out prompts with the real engine.

Called by `megarl.train` on each rank of one generator replica; its head scores and writes
``eval.json`` into the run folder.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import decode, eos_id, load_model_tokenizer
from megarl.executors.generator import Sampling, sample_all
from megarl.executors.reward import reward_item
from megarl.observe.files import replacing
from megarl.rewards.pool import RewardPool
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
    pairs = [(index, sample) for index in range(len(prompts)) for sample in range(n + 1)]
    sampling = Sampling(config=config, n=n, eos_token_id=eos_id(tokenizer))
    with rank.tracer.span("testing"):
        samples = sample_all(engine, sampling.requests(prompts, pairs))
    engine.close()
    if rank.world.rank != 0:
        return
    items = [
        reward_item(
            prompts[sample.request_id // (n + 1)],
            decode(tokenizer, sample.tokens),
            sample.finished,
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
    with replacing(config.folder / EVAL_FILE) as text:
        json.dump(result, text, indent=1)
    logger.info("accuracy %.4f, greedy %.4f", result["accuracy"], result["accuracy_greedy"])
