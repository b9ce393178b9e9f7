"""What generators are called."""

from __future__ import annotations

import pytest

from lorabridge.rollout.wire import name_of


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "0.0.0.0", "[::1]", "[::]"])
def test_servers_of_two_hosts_that_are_each_here_have_two_names(host: str) -> None:
    assert name_of(f"http://{host}:8000", "one") == "http://one:8000"
    assert name_of(f"http://{host}:8000", "another") == "http://another:8000"
    assert name_of(f"https://{host}", "one") == "https://one"


@pytest.mark.parametrize("url", ["http://10.0.0.2:8000", "http://[2001:db8::1]:8000", "https://gpu-7.example:8443/v"])
def test_an_address_that_means_the_same_everywhere_is_the_name(url: str) -> None:
    assert name_of(url, "one") == url
