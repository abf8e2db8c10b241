"""The version of what runs, as `GET /version` and the metrics tell it."""

from importlib.metadata import PackageNotFoundError, version


def server_version() -> str:
    try:
        return version("tandem")
    except PackageNotFoundError:  # run from the source tree
        return "0.0.0+source"
