"""The one error of loading a model: its message is one line that says what to do about it."""


class ModelLoadError(Exception):
    """The model cannot be served as it is configured. The message is meant for whoever started the engine."""
