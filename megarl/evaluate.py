"""``megarl eval``: score a Hugging Face checkpoint on held-out prompts with the real engine.

Called by `megarl.train` on each rank of one generator replica; its head scores and writes
``eval.json`` into the run folder.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import eos_id, load_model_tokenizer
from megarl.observe.files import replacing
from megarl.rollout.engine import SampleRequest, sample_all
from megarl.rollout.scoring import Scorer
from megarl.rollout.tasks import sampling_seed
from megarl.topology import GENERATOR
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
    n, rollout = config.eval.n, config.rollout
    requests = [
        SampleRequest(
            request_id=index * (n + 1) + sample,
            prompt=prompt.tokens,
            max_tokens=rollout.max_response_length,
            temperature=rollout.temperature if sample < n else 0.0,
            seed=sampling_seed(config.seed, prompt.prompt_id, sample),
            eos_token_id=eos_id(tokenizer),
        )
        for index, prompt in enumerate(prompts)
        for sample in range(n + 1)
    ]
    with rank.tracers[GENERATOR].span("testing"):
        samples = sample_all(engine, requests)
    engine.close()
    if rank.world.rank != 0:
        return
    scorer = Scorer(config, tokenizer)
    try:
        scores = scorer.score([(prompts[s.request_id // (n + 1)], s) for s in samples])
    finally:
        scorer.close()
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
