from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megarl.config import Mode, RunConfig
from megarl.config_file import load_config, schema_rows, to_yaml
from megarl.errors import ConfigError
from megatron_bridge.cluster import load_cluster

ROOT = Path(__file__).parents[3]


def _write(tmp_path: Path, text: str = "name: x\n") -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    assert load_config(path).name


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "clusters").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_shipped_cluster_loads(path: Path) -> None:
    assert load_cluster(path).name == path.stem


def test_overrides_win_over_the_file_and_keep_their_types(tmp_path: Path) -> None:
    path = _write(tmp_path, "mode: async\ntrainer: {lr: 1.0e-3, layout: {tp: 2}}\n")
    config = load_config(path, ("mode=sync", "trainer.layout.pp=2", "trainer.lr=1e-4"))
    assert (config.mode, config.trainer.lr) == (Mode.SYNC, 1e-4)
    assert (config.trainer.layout.tp, config.trainer.layout.pp) == (2, 2)


def test_an_override_without_a_value_empties_a_text_and_is_refused_elsewhere(
    tmp_path: Path,
) -> None:
    path = _write(tmp_path, "data: {eval_path: x.jsonl}\n")
    assert load_config(path, ("data.eval_path=",)).data.eval_path == ""
    with pytest.raises(ConfigError, match="max_steps"):
        load_config(path, ("max_steps=",))


def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path), ("mode=sync", "algorithm.adv_estimator=leave_one_out"))
    again = load_config(_write(tmp_path, to_yaml(config)))
    assert again == config
    assert "mode: sync" in to_yaml(config)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.lrr=1", ["trainer.lrr", "did you mean 'trainer.lr'"]),
        ("rolout.n=2", ["rolout", "did you mean 'rollout'"]),
        ("trainer.lr=fast", ["trainer.lr", "fast"]),
        ("mode=later", ["mode", "later"]),
        ("trainer=3", ["trainer", "mapping"]),
        ("trainer.layout.tp=0", ["trainer.layout.tp", "at least 1", "0"]),
        ("trainer.layout.sequence_parallel=true", ["sequence_parallel", "tp is 1"]),
        ("trainer.layout.vpp=2", ["vpp", "pp is 1"]),
        ("rollout.top_p=0.9", ["top_p", "renormalised", "0.9"]),
        ("rollout.top_k=50", ["top_k", "renormalised", "50"]),
        ("rollout.temperature=0", ["rollout.temperature", "above 0"]),
        ("algorithm.rho=0", ["algorithm.rho", "above 0"]),
        ("model.dtype=float16", ["model.dtype", "float16"]),
        ("trainer.lr_decay_style=step", ["lr_decay_style", "cosine"]),
        ("fault.timeout_seconds=0", ["fault.timeout_seconds", "above 0"]),
        ("trainer.lr_warmup_steps=-1", ["trainer.lr_warmup_steps", ">= 0", "-1"]),
        ("trainer.updates_per_batch=0", ["trainer.updates_per_batch", "at least 1", "0"]),
        ("weights.sync_every=0", ["weights.sync_every", "at least 1", "0"]),
        ("weights.sync_every=3", ["max_staleness", "at least 2", "sync_every=3", "got 1"]),
        ("name", ["name", "key=value"]),
    ],
)
def test_a_bad_value_is_refused_with_its_key(
    tmp_path: Path, override: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_write(tmp_path), (override,))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_colocated_executors_take_turns_and_have_the_same_ranks(tmp_path: Path) -> None:
    path = _write(tmp_path, "placement: colocated\ntrainer: {layout: {tp: 2, dp: 2}}\n")
    with pytest.raises(ConfigError, match=r"mode must be sync .* got 'async'"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"generator\.layout must be .* 4 ranks.* got 1$"):
        load_config(path, ("mode=sync",))
    layout = ("generator.layout.tp=2", "generator.layout.replicas=2")
    with pytest.raises(ConfigError, match=r"enforce_eager must be true for placement=colocated"):
        load_config(path, ("mode=sync", "generator.enforce_eager=false", *layout))
    config = load_config(path, ("max_staleness=0", *layout))
    assert (config.first_generator_rank, config.num_engine_ranks) == (0, 4)
    separate = load_config(path, ("placement=separate", *layout))
    assert (separate.first_generator_rank, separate.num_engine_ranks) == (4, 8)


def test_weights_may_travel_less_often_where_tokens_may_be_old_enough(tmp_path: Path) -> None:
    path = _write(tmp_path, "weights: {sync_every: 3}\n")
    assert load_config(path, ("max_staleness=2", "eval.test_freq=6")).weights.sync_every == 3
    with pytest.raises(ConfigError, match=r"max_staleness must be at least 2 .*, got 0$"):
        load_config(path, ("mode=sync", "max_staleness=2"))
    with pytest.raises(ConfigError, match=r"eval\.test_freq must be a multiple of .*=3.*, got 4"):
        load_config(path, ("max_staleness=2", "eval.test_freq=4"))


def test_a_decay_needs_steps_behind_the_warm_up(tmp_path: Path) -> None:
    path = _write(tmp_path, "max_steps: 10\ntrainer: {lr_warmup_steps: 10}\n")
    load_config(path)
    with pytest.raises(ConfigError, match=r"lr_warmup_steps must be below .* 10 .*, got 10$"):
        load_config(path, ("trainer.lr_decay_style=cosine",))
    load_config(path, ("trainer.lr_decay_style=cosine", "trainer.updates_per_batch=2"))


def test_leave_one_out_needs_two_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.n"):
        load_config(_write(tmp_path), ("algorithm.adv_estimator=leave_one_out", "rollout.n=1"))


@pytest.mark.parametrize(
    ("text", "words"),
    [("nonsense: 1\n", "nonsense"), ("- a\n", "mapping"), ("a: [\n", "readable YAML")],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_schema_lists_exactly_the_keys_of_a_resolved_configuration() -> None:
    def leaves(node: dict, prefix: str = "") -> list[str]:
        return [
            leaf
            for key, value in node.items()
            for leaf in (
                leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
            )
        ]

    resolved = OmegaConf.to_container(OmegaConf.create(to_yaml(RunConfig())))
    assert isinstance(resolved, dict)
    assert [row[0] for row in schema_rows(RunConfig)] == leaves(resolved)
