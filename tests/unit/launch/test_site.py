"""Cluster files: the groups of launching beside the links, and what they refuse."""

from pathlib import Path

import pytest

from launch.site import Container, load_site
from megarl.errors import ConfigError
from megatron_bridge.cluster import load_cluster
from megatron_bridge.errors import PlanError

CLUSTERS = Path(__file__).parents[3] / "configs" / "clusters"
DEVICE = "device: {memory_gib: 80, peak_tflops: 989, memory_bytes_per_second: 3.35e12}\n"


def _write(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(("name", "is_gpu"), [("dgx_h100", True), ("cpu_machine", False)])
def test_our_clusters_can_be_launched_on(name: str, is_gpu: bool):
    site = load_site(CLUSTERS / f"{name}.yaml")
    assert site.links == load_cluster(CLUSTERS / f"{name}.yaml")
    assert site.links.name == name
    assert site.device.is_gpu is is_gpu
    assert all(variable.why for variable in site.slurm.environment)


def test_every_group_is_read(tmp_path: Path):
    slurm = "slurm: {container: pyxis, image: a.sqsh, mounts: [/b]}\n"
    links = "ranks_per_host: 4\nnic_bytes_per_second: 10.0e9\nnic_efficiency: 0.9\n"
    text = links + DEVICE + slurm + "preflight: {list_gpus: rocm-smi}"
    site = load_site(_write(tmp_path, text))
    assert site.links.ranks_per_host == 4
    assert site.device.peak_tflops == 989
    assert (site.slurm.container, site.slurm.mounts) == (Container.PYXIS, ["/b"])
    assert site.preflight.list_gpus == "rocm-smi"
    assert site.link_bytes_per_second == 9e9


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("ranks_per_host: 4", ConfigError, "device.memory_gib is 0.0, expected above 0"),
        (DEVICE + "slurm: {partitio: a}", ConfigError, "partitio"),
        (DEVICE + "slurm: {hosts: many}", ConfigError, "many"),
        (DEVICE + "slurm: {spare_hosts: -1}", ConfigError, "spare_hosts is -1"),
        (DEVICE + "slurm: {generator_cpus_per_host: -8}", ConfigError, "per_host is -8"),
        (DEVICE + "slurm: {container: pyxis}", ConfigError, "image is ''; expected both"),
        (DEVICE + "slurm: {image: a.sqsh}", ConfigError, "container is none"),
        (DEVICE + "preflight: {shm_gib: -1}", ConfigError, "preflight.shm_gib is -1"),
        (DEVICE + "preflight: {list_gpu: x}", ConfigError, "list_gpu"),
        (DEVICE.replace("80", "80, decode_efficiency: 1.5"), ConfigError, "decode_efficiency is"),
        (DEVICE + "rank_per_host: 4", PlanError, "rank_per_host"),
        ("- 1", PlanError, "cluster.yaml"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, error: type[Exception], words: str):
    with pytest.raises(error) as caught:
        load_site(_write(tmp_path, text))
    assert words in str(caught.value)
    assert "cluster" in str(caught.value)
