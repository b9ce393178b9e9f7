"""What the supervisor decides without a process."""

from lorabridge.bridge.run.supervisor import environment


def test_settings_in_the_environment_are_taken_in_once_and_not_handed_on() -> None:
    handed = environment({
        "LORABRIDGE_REDIS__URL": "redis://elsewhere", "lorabridge_run__id": "x", "LORABRIDGE_TRAINER": "{}",
        "LORABRIDGE_REDIS_PASSWORD": "secret", "LORABRIDGE_CONTROL_TOKEN": "token", "PATH": "/bin",
        "LORABRIDGE_DEBUG": "1",
    })  # fmt: skip
    assert handed == {
        "LORABRIDGE_REDIS_PASSWORD": "secret", "LORABRIDGE_CONTROL_TOKEN": "token", "PATH": "/bin",
        "LORABRIDGE_DEBUG": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1",
    }  # fmt: skip
