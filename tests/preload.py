"""What the server imports that tests fork their ranks from: both engines, once and for all of them.

vLLM alone takes ten seconds. It reads its environment while it is imported.
"""

import gc

gc.disable()  # nothing of what is imported is garbage

from megarl.rollout.vllm_engine import set_environment  # noqa: E402

set_environment(on_gpu=False)

import vllm.engine.arg_utils  # noqa: E402
import vllm.v1.engine.llm_engine  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import megarl.executors.trainer  # noqa: E402
import megarl.rollout.vllm_worker  # noqa: E402
import megarl.wiring  # noqa: E402, F401

gc.freeze()  # nor do the forked ranks look among it, which would copy its pages
gc.enable()
