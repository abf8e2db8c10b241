"""The type of the fixture `start_server`: a conftest cannot be imported by its name, which others have too."""

from collections.abc import Callable

from loadtest.server_process import ServerProcess

StartServer = Callable[..., ServerProcess]
