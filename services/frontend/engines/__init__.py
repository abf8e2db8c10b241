"""The engines that a frontend talks to: `EnginePool` is one model's."""

from services.frontend.engines.pool import EnginePool

__all__ = ["EnginePool"]
