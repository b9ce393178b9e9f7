"""What the demo chooses by itself."""

from pathlib import Path

import pytest

from lorabridge.bridge.errors import ConfigError, MachineError
from lorabridge.bridge.run.demo import base_folder, configuration, fitted, reserve
from lorabridge.bridge.settings import Settings, load


def settings(*overrides: str) -> Settings:
    return load(configuration(), overrides)


def test_the_shipped_configuration_is_what_the_demo_is_about() -> None:
    demo = settings()
    samples = demo.trainer.per_device_train_batch_size * demo.trainer.gradient_accumulation_steps
    assert samples % demo.rollout.num_generations == 0
    assert demo.trainer.max_steps // demo.publish.every >= 40
    assert demo.model.path == ""
    groups_per_step = samples // demo.rollout.num_generations
    assert demo.groups_ahead / groups_per_step < demo.lag.max


def test_each_demo_has_a_folder_and_a_name_of_its_own(tmp_path: Path) -> None:
    asked = settings(f"run.dir={tmp_path}/runs/demo")
    runs = [reserve(asked).run for _ in range(3)]
    assert [run.id for run in runs] == ["demo", "demo-2", "demo-3"]
    assert [run.dir.name for run in runs] == ["demo", "demo-2", "demo-3"]
    assert all(run.dir.is_dir() for run in runs)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match=r"cannot make .*file/demo: File exists"):
        reserve(settings(f"run.dir={tmp_path}/file/demo"))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (16, 8)])
def test_trainer_and_server_share_the_cores(cores: int, threads: int) -> None:
    found = fitted(settings(), cores, 1)
    assert (found.trainer.threads, found.generators.threads) == (threads, threads)
    assert (found.generators.port, found.generators.control_port) == (1, 2)


def test_what_the_user_chose_stays() -> None:
    asked = settings("generators.port=9000", "trainer.threads=3", "generators.threads=5")
    found = fitted(asked, 2, 1)
    assert (found.generators.port, found.generators.control_port) == (9000, 2)
    assert (found.trainer.threads, found.generators.threads) == (3, 5)


def test_the_demo_attaches_to_nothing() -> None:
    with pytest.raises(ConfigError, match="its own server"):
        fitted(settings('generators.urls=["http://host"]'), 2, 1)


def test_the_base_model_is_kept_where_caches_are(tmp_path: Path) -> None:
    folder = base_folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert folder.parent == tmp_path / "lorabridge"
    assert folder.name.startswith("sort-")
    assert base_folder({}).parent == Path.home() / ".cache" / "lorabridge"
