"""Reward functions for the tests of the pool; each behaves as its item's answer says."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time


def obey(prompt: str, response: str, answer: str, extra: dict) -> object:
    """Do what `answer` says; otherwise return it as a number."""
    match answer:
        case "sleep":
            time.sleep(600)
        case "hold the interpreter lock":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            sys.exit(3)
        case "raise":
            raise RuntimeError(f"no score for {response}")
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "nothing":
            return None
        case "no score":
            return {"format": 1.0}
        case "reserved":
            return {"score": 1.0, "errors": 1.0}
        case "extra":
            return {"score": extra["weight"], "finished": extra["finished"]}
        case "torch":
            return "torch" in sys.modules
        case "pid":
            return {"score": 1.0, "pid": os.getpid()}
        case "child":
            child = subprocess.Popen(["sleep", "600"])
            return {"score": 1.0, "pid": child.pid}
        case "input":
            print("reward output", file=sys.stderr)
            return len(sys.stdin.read())
    return float(answer)


def two_arguments(prompt: str, response: str) -> float:
    return 1.0


NOT_A_FUNCTION = 3
