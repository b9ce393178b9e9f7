"""A policy's name becomes a folder, a Redis key and a model name."""

from __future__ import annotations

import pytest

from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.manifest import check_policy_name


@pytest.mark.parametrize("name", ["policy", "p", "7b", "team.a_policy-2", "a" * 100])
def test_a_name_is_kept(name: str) -> None:
    assert check_policy_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-flag", "_x", "a/b", "../a", "a\\b", "a b", "a\n", "a\0", "é", "a:b", "a{b}",
             "a" * 101],
)  # fmt: skip
def test_what_could_leave_its_folder_or_key_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a policy"):
        check_policy_name(name)
