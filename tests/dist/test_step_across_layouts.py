"""One RL step is the same on every trainer layout, and the generators then hold exactly it.

Seven processes: ranks 0..3 train on as many ranks as the layout at hand needs, rank 4 is a
generator of its own and ranks 5, 6 are one of tp 2. All engines are the real ones. The batch is
sampled once, by rank 4, from the starting weights.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.checkpoint import StartPoint
from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.data.starting_model import write_starting_model
from megarl.ddma.engine import WeightSync
from megarl.ddma.transports.collective import CollectiveTransport
from megarl.observe.trace import Tracer
from megarl.rollout.engine import SampleRequest
from megarl.rollout.vllm_engine import VllmEngine
from megarl.world import timed_wait
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.models.families import load_spec
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import plan
from megatron_bridge.side import Side
from tests.jobs import ROOT
from tests.dist.vllm_cases import make_settings
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

LAYOUTS = {
    "tp1": ("trainer.layout.tp=1",),
    "tp2": ("trainer.layout.tp=2",),
    "pp2": ("trainer.layout.tp=1", "trainer.layout.pp=2"),
    "dp2": ("trainer.layout.tp=1", "trainer.layout.dp=2"),
    "tp2 pp2": ("trainer.layout.tp=2", "trainer.layout.pp=2"),
    "tp2 dp2 distributed optimizer": (
        "trainer.layout.tp=2",
        "trainer.layout.dp=2",
        "trainer.distributed_optimizer=true",
    ),
}
REPLICAS = ((4,), (5, 6))
NUM_PROMPTS, SAMPLES = 8, 4
WAIT = timed_wait(60.0)


def _config(folder: str, layout: str) -> RunConfig:
    overrides = (
        f"run_dir={folder}",
        f"name={layout.replace(' ', '-')}",
        f"model.path={folder}/model",
        "trainer.lr=1e-3",
        f"rollout.n={SAMPLES}",
        f"data.train_batch_size={NUM_PROMPTS}",
        "trainer.max_tokens_per_micro_batch=256",  # several micro-batches a rank
        "max_steps=1",
        *LAYOUTS[layout],
    )
    return load_config(ROOT / "configs" / "quickstart.yaml", overrides)


class _Meeting:
    """The store that all ranks share: groups under it, and files announced through it."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def group(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        store = dist.PrefixStore(name, self.store)
        timeout = timedelta(seconds=120)
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timeout)

    def enter_world(self, name: str, ranks: tuple[int, ...]) -> None:
        local = ranks.index(self.rank)
        store = dist.PrefixStore(f"world/{name}", self.store)
        dist.init_process_group("gloo", store=store, rank=local, world_size=len(ranks))
        os.environ.update(RANK=str(local), LOCAL_RANK=str(local), WORLD_SIZE=str(len(ranks)))

    def announce(self, key: str) -> None:
        self.store.set(key, "1")

    def await_(self, key: str) -> None:
        self.store.wait([key], timedelta(seconds=240))


def _link(meeting: _Meeting, config: RunConfig, params: dict, layout: TrainerLayout) -> WeightSync:
    spec = load_spec(Path(config.model.path))
    trainers = tuple(range(layout.world_size))
    ranks = trainers + REPLICAS[0] + REPLICAS[1]
    # Ranks of the plan are ranks of the group: generators follow the trainers without a gap.
    first = len(trainers)
    blocks = [
        block
        for replica in REPLICAS
        for block in vllm_side(
            spec, GeneratorLayout(tp=len(replica)), first_rank=first + replica[0] - 4
        ).blocks
    ]
    group = meeting.group(f"weights/{config.name}", ranks)
    transport = CollectiveTransport(group, torch.device("cpu"), wait=WAIT)
    transfer = plan(megatron_side(spec, layout), Side(tuple(blocks)))
    return WeightSync(transfer, ranks.index(meeting.rank), transport, params)


def _train(meeting: _Meeting, folder: str) -> dict[str, object]:
    from megarl.executors.policy import ExportLink
    from megarl.executors.trainer import Surroundings, TrainerExecutor
    from megarl.rollout.batch import Scored, split_batch

    results: dict[str, object] = {}
    for name in LAYOUTS:
        config = _config(folder, name)
        layout = config.trainer.layout
        ranks = tuple(range(layout.world_size))
        if meeting.rank not in ranks:
            continue
        meeting.enter_world(name, ranks)
        link = ExportLink(
            group=meeting.group(f"export/{name}", ranks) if len(ranks) > 1 else None, wait=WAIT
        )
        around = Surroundings(link=link, arrive=lambda tick: None)
        trainer = TrainerExecutor(config, StartPoint(), meeting.rank, around, Tracer("trainer", 0))
        trainer.init()
        meeting.await_("rollouts")
        rollouts = torch.load(f"{folder}/rollouts.pt", weights_only=False)
        # Rewards that differ within a group: a model that knows nothing earns none by itself.
        rewards = (rollouts.lengths % 3).double() / 2
        part = split_batch(Scored(rollouts=rollouts, rewards=rewards), config)[
            layout.coordinate(meeting.rank).dp
        ]
        trainer.put_input("batch", [part])
        trainer.step()
        sync = _link(meeting, config, dict(trainer.get_model()), layout)
        sync.send(trainer.version)
        trainer.policy.export(link)
        metrics = trainer.get_output("metrics/trainer")[0].to_dict()  # type: ignore[attr-defined]
        results[name] = (metrics["actor/loss"], metrics["actor/grad_norm"])
        trainer.close()
        dist.destroy_process_group()
        if meeting.rank == 0:
            meeting.announce(f"exported/{name}")
    return results


def _generate(meeting: _Meeting, folder: str) -> dict[str, object]:
    from megarl.data.prompts import Prompt
    from megarl.rollout.batch import to_rollouts
    from megarl.rollout.engine import sample_all
    from megarl.rollout.tasks import sampling_seed

    replica = next(replica for replica in REPLICAS if meeting.rank in replica)
    meeting.enter_world(f"replica{replica[0]}", replica)

    engine = VllmEngine(
        make_settings(
            f"{folder}/model",
            tp=len(replica),
            max_model_len=64,
            kv_cache_bytes=16 << 20,
            job=f"layouts-{meeting.store.port}-{replica[0]}",
            load_weights=True,
        )
    )
    if meeting.rank == 4:
        prompts = [
            Prompt(prompt_id=i, tokens=(1, 3 + i, 13, 4, 17, 18), text="", answer="", extra="")
            for i in range(NUM_PROMPTS)
        ]
        requests = [
            SampleRequest(
                request_id=i,
                prompt=prompts[i // SAMPLES].tokens,
                max_tokens=24,
                temperature=1.0,
                seed=sampling_seed(0, i // SAMPLES, i % SAMPLES),
                eos_token_id=2,
            )
            for i in range(NUM_PROMPTS * SAMPLES)
        ]
        samples = sample_all(engine, requests)
        rows = [(prompts[i // SAMPLES], i % SAMPLES, sample) for i, sample in enumerate(samples)]
        torch.save(to_rollouts(rows), f"{folder}/rollouts.pt")
        meeting.announce("rollouts")
    received: dict[str, dict[str, torch.Tensor]] = {}
    params = engine.parameters()
    for name in LAYOUTS:
        config = _config(folder, name)
        for tensor in params.values():  # poison: only the transfer can make it right
            tensor.fill_(torch.nan)
        sync = _link(meeting, config, params, config.trainer.layout)
        assert sync.receive() == 1
        received[name] = {key: tensor.clone() for key, tensor in params.items()}
    differences = {}
    for name, got in received.items():
        meeting.await_(f"exported/{name}")
        load_by_vllm(engine, Path(folder) / name.replace(" ", "-") / "hf")
        assert params.keys() == got.keys()
        differences[name] = [key for key in params if not torch.equal(got[key], params[key])]
    engine.close()
    return differences


def load_by_vllm(engine: VllmEngine, folder: Path) -> None:
    """Have vLLM's own loader fill an engine's parameters, which only that can make right."""
    for tensor in engine.parameters().values():
        tensor.fill_(torch.nan)
    (file,) = folder.glob("*.safetensors")
    engine._model.load_weights(load_file(file).items())  # type: ignore[operator]


def _run(rank: int, size: int, port: int, folder: str) -> dict[str, object]:
    meeting = _Meeting(rank, port)
    return _train(meeting, folder) if rank < 4 else _generate(meeting, folder)


def test_one_step_is_the_same_on_every_layout_and_arrives_bit_for_bit(tmp_path: Path) -> None:
    write_starting_model(tmp_path / "model", 0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_ranks(_run, 7, store.port, str(tmp_path), timeout=400, default_group=False)
    loss, grad_norm = results[0]["tp1"]
    assert abs(loss) > 1e-4
    assert grad_norm > 1e-3
    for result in results[:4]:
        for name, (other_loss, other_norm) in result.items():
            assert other_loss == pytest.approx(loss, rel=1e-4), name
            assert other_norm == pytest.approx(grad_norm, rel=1e-4), name
    assert set(results[0]) == set(LAYOUTS)
    for result in results[4:]:
        assert result == {name: [] for name in LAYOUTS}
