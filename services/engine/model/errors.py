"""The one error of loading a model: its message is one line that says what to do about it."""

from shared.model_source import ModelSourceError


class ModelLoadError(ModelSourceError):
    """The files are there, but cannot be served as the engine is configured."""
