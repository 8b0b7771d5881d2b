"""The benchmark of weight transfers: its known weights, its floors, and one small case of it."""

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from megatron_bridge.box import Box
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from tools.known_weights import DTYPE, KnownWeights
from tools.weight_cases import CASES, SCHEMES, Case, floor_of, num_bytes, tiny
from tools.weight_peers import buckets_of, why_megatron_cannot

ROOT = Path(__file__).parents[2]
MODEL_BYTES = (
    123_750_400  # of LLAMA: 2 (2 V H + H + L (H (1536 + 1024 + 3 F) + 2 H)) with its sizes
)


def _bench(*arguments: str) -> dict:
    command = [sys.executable, "-m", "tools.bench_weight_sync", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.dist
def test_one_case_gives_all_figures_of_all_schemes() -> None:
    """Each scheme's result was compared bit by bit before it was timed."""
    name = "moe tp2ep2etp2->tp2"
    output = _bench("--tiny", "--network", "loopback", "--repeats", "1", "--cases", name)
    (row,) = output["cases"]
    assert (row["name"], row["network"]) == (name, "loopback")
    assert row["reasons"].keys() <= {"predicted_seconds"}
    for scheme in SCHEMES:
        assert row[f"{scheme}_seconds"] > 0
        assert row["schemes"][scheme]["first_seconds"] > 0
    case = replace(CASES[name], spec=tiny(CASES[name].spec))
    assert row["bytes"] == sum(map(num_bytes, case.targets))
    # A megabyte of weights; the rest is what any process of gloo and Python grows by.
    assert 0 < row["extra_bytes"] < row["extra_bytes_bound"] + (32 << 20)


@pytest.mark.parametrize(
    ("name", "unicast", "forwarding"),
    [
        # Each of 4 generators takes the model; 4 trainers give as much as 4 models.
        ("tp2dp2->tp1x4", 1.0, 1.0),
        ("tp1dp4->tp2x2", 0.5, 0.5),
        # 8 generators take half a model each from 4 trainers; with forwarding these give 1/4 each.
        ("tp2dp2->tp2x4", 1.0, 0.5),
        # 4 generator hosts take two halves each, the 2 trainer hosts give 4 models: 2 each.
        ("tp2dp2->tp2x4 two ranks a host", 2.0, 1.0),
    ],
)
def test_the_floor_is_the_share_of_the_busiest_nic(
    name: str, unicast: float, forwarding: float
) -> None:
    floor = floor_of(CASES[name])
    # Norms, which tensor parallel ranks all hold, are less than a thousandth.
    assert floor.unicast_bytes == pytest.approx(unicast * MODEL_BYTES, rel=1e-3)
    assert floor.forwarding_bytes == pytest.approx(forwarding * MODEL_BYTES, rel=1e-3)


def test_a_lone_holder_sets_the_floor() -> None:
    """One trainer rank for two generators: it must send the model twice."""
    case = Case("1->1x2", TrainerLayout(), GeneratorLayout(replicas=2))
    assert floor_of(case).unicast_bytes == 2 * MODEL_BYTES
    assert floor_of(case).forwarding_bytes == MODEL_BYTES


def test_known_weights_are_found_wrong_when_one_element_is() -> None:
    case = CASES["tp2dp2->tp1x4"]
    spec = tiny(case.spec)
    (first, *_) = replace(case, spec=spec).sources
    known = KnownWeights(spec)
    params = {param.name: torch.zeros(param.shape, dtype=DTYPE) for param in first.params}
    known.fill(first, params)
    assert known.differing(first, params) == []
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    params[name][3, 5] += 1
    assert known.differing(first, params) == [name]


def test_known_weights_follow_their_formula() -> None:
    spec = tiny(CASES["tp2dp2->tp1x4"].spec)
    known = KnownWeights(spec)
    box = Box((2, 10), (4, 13))
    values = known._of("lm_head.weight", box)
    salt = known._tensors["lm_head.weight"][0]
    for row in range(2):
        for column in range(3):
            flat = (2 + row) * spec.hidden_size + 10 + column
            assert values[row, column] == (flat * 7919 + salt * 104_729) % 251 - 125


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"trainer": TrainerLayout(tp=2, dp=2, vocab_divisor=1000)}, "padded vocabularies differ"),
        ({"trainer": TrainerLayout(tp=2, pp=2, vpp=2)}, "interleaved"),
    ],
)
def test_what_megatron_cannot_plan_is_said(changes: dict, reason: str) -> None:
    case = replace(CASES["tp2dp2->tp1x4"], **changes)
    assert reason in why_megatron_cannot(case)
    assert bool(reason) == bool(why_megatron_cannot(case))


MIXED = TrainerLayout(tp=2, pp=2, dp=2, ep=2, sequence_parallel=True)  # experts in two ways


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), replace(CASES["moe tp2ep2etp2->tp2"], name="moe pp2", trainer=MIXED)],
    ids=lambda case: case.name,
)
def test_buckets_bring_every_tensor_once_and_whole(case: Case) -> None:
    buckets = buckets_of(case)
    names = [name for bucket in buckets for name in bucket.places]
    assert sorted(names) == sorted(tensor.name for tensor in canonical_tensors(case.spec))
    gathered: dict[str, set[tuple[int, ...]]] = {}
    for shard in (s for bucket in buckets for unit in bucket.units for _, s in unit.shards):
        gathered.setdefault(shard.tensor, set()).add((*shard.box.start, *shard.box.stop))
    for tensor in canonical_tensors(case.spec):
        boxes = gathered[tensor.name]
        half = len(tensor.shape)
        assert sum(Box(box[:half], box[half:]).numel for box in boxes) == prod(tensor.shape)
