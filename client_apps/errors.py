"""The error meant for the person at the keyboard."""


class ConfigError(ValueError):
    """A configuration that cannot run; its message is one sentence saying what, where and what to do."""
