"""Settings as the environment variables that a child process reads them from.

Variables and not flags: a command line, with the API keys in it, could be read by every user.
"""

import json
from collections.abc import Mapping
from typing import Any

PREFIX = "TANDEM_"


def as_variables(values: Mapping[str, Any]) -> dict[str, str]:
    """TANDEM_… for every setting that has a value; what is not text is JSON."""
    return {
        PREFIX + name.upper(): value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
        if value is not None
    }
