"""A reward for tests that an untrained model earns now and then."""


def score(prompt: str, response: str, answer: str, extra: dict) -> float:
    return float(len(response) % 2)
