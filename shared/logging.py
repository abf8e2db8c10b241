"""How every service logs: lines for people on a terminal, one JSON object a line everywhere else."""

import json
import logging
import sys
from datetime import UTC, datetime

# Attributes of every LogRecord; whatever else a record has was given as `extra`.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One line a record: time, level, service, logger, message, the exception if any, and what `extra` gave."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line.update((name, value) for name, value in record.__dict__.items() if name not in _STANDARD)
        return json.dumps(line, default=str)


class ConsoleFormatter(logging.Formatter):
    """A line for people: time, level, service, message, and what `extra` gave as name=value."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-8s {service}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        given = [f"{name}={value}" for name, value in record.__dict__.items() if name not in _STANDARD]
        return " ".join([super().formatMessage(record), *given])


def configure_logging(level: str, service: str) -> None:
    """Log to stderr, from `level` on. Replaces whatever was configured before."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty():
        handler.setFormatter(ConsoleFormatter(service))
    else:
        handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # At info these tell of every request and connection of their own.
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "uvicorn", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
    adopt_libraries()


def adopt_libraries() -> None:
    """Have libraries that brought handlers of their own log as everything else does. To be called again after such a
    library was imported."""
    for known in list(logging.root.manager.loggerDict.values()):
        if isinstance(known, logging.Logger) and known.handlers:
            known.handlers.clear()
            known.propagate = True
