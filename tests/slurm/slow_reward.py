"""A reward for tests that an untrained model earns now and then, and that makes steps last."""

import time


def score(prompt: str, response: str, answer: str, extra: dict) -> float:
    time.sleep(0.02)
    return float(len(response) % 2)
