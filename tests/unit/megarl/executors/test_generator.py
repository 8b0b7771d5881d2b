from megarl.data.prompts import Prompt
from megarl.executors.generator import sampling_seed, to_rollouts
from megarl.rollout.engine import Sample


def _make_prompt(prompt_id: int, *tokens: int) -> Prompt:
    return Prompt(prompt_id=prompt_id, tokens=tokens, text="", answer="", extra="")


def _make_sample(request_id: int, *tokens: int, version: int = 7, finished: bool = True) -> Sample:
    logprobs = tuple(-0.5 * token for token in tokens)
    return Sample(
        request_id=request_id,
        tokens=tokens,
        logprobs=logprobs,
        finished=finished,
        version=version,
    )


def test_samples_become_one_message_in_the_order_of_their_requests() -> None:
    prompts = [_make_prompt(40, 1, 5), _make_prompt(41, 1)]
    samples = [
        _make_sample(3, 9, finished=False),
        _make_sample(0, 6, 2),
        _make_sample(2, 2),
        _make_sample(1, 8),
    ]
    rollouts = to_rollouts(prompts, samples, stride=2)
    assert rollouts.prompt_ids.tolist() == [40, 40, 41, 41]
    assert rollouts.sample_ids.tolist() == [0, 1, 0, 1]
    assert rollouts.tokens.tolist() == [1, 5, 6, 2, 1, 5, 8, 1, 2, 1, 9]
    assert rollouts.lengths.tolist() == [4, 3, 2, 2]
    assert rollouts.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert rollouts.logprobs.tolist() == [0, 0, -3, -1, 0, 0, -4, 0, -1, 0, -4.5]
    assert rollouts.versions.tolist() == [-1, -1, 7, 7, -1, -1, 7, -1, 7, -1, 7]
    assert rollouts.finished.tolist() == [1, 1, 1, 0]


def test_no_samples_are_an_empty_message() -> None:
    assert to_rollouts((), (), 1).tokens.tolist() == []


def test_sampling_seeds_repeat_and_differ_by_run_prompt_and_sample() -> None:
    seeds = {
        sampling_seed(seed, prompt, sample)
        for seed in range(3)
        for prompt in range(200)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 200 * 8
    assert sampling_seed(1, 2, 3) == sampling_seed(1, 2, 3)
