"""Reward functions for the tests of the pool; `obey` behaves as its item's answer says."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time


def _raise(response: str, extra: dict) -> float:
    raise RuntimeError(f"no score for {response}")


def _stop(response: str, extra: dict) -> float:
    """Be asked to stop, as by Slurm, which asks all processes of a job."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return 1.0


BEHAVIOURS = {
    "sleep": lambda response, extra: time.sleep(600),
    "hold the interpreter lock": lambda response, extra: re.match(r"(a+)+$", "a" * 40 + "b"),
    "segfault": lambda response, extra: ctypes.string_at(0),
    "exit": lambda response, extra: sys.exit(3),
    "raise": _raise,
    "stop": _stop,
    "nan": lambda response, extra: float("nan"),
    "text": lambda response, extra: "1.0",
    "nothing": lambda response, extra: None,
    "no score": lambda response, extra: {"format": 1.0},
    "reserved": lambda response, extra: {"score": 1.0, "errors": 1.0},
    "extra": lambda response, extra: {"score": extra["weight"], "finished": extra["finished"]},
    "torch": lambda response, extra: "torch" in sys.modules,
    "pid": lambda response, extra: {"score": 1.0, "pid": os.getpid()},
    "child": lambda response, extra: {"score": 1, "pid": subprocess.Popen(["sleep", "600"]).pid},
    "input": lambda response, extra: len(sys.stdin.read()),
}


def obey(prompt: str, response: str, answer: str, extra: dict) -> object:
    """Do what `answer` says; otherwise return it as a number."""
    behaviour = BEHAVIOURS.get(answer)
    return behaviour(response, extra) if behaviour else float(answer)


def two_arguments(prompt: str, response: str) -> float:
    return 1.0


NOT_A_FUNCTION = 3
