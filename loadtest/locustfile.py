"""Load on any OpenAI-compatible URL: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`.

Without a choice every scenario runs, by its weight; name classes at the end to run only those (ChatUser, AgentUser…),
or pick them on the page (`--class-picker`). With `--headless --csv results/run` the tokens' numbers go to
results/run_tokens.csv, of which `python -m loadtest.locust_report results/run` makes a page with plots.
"""

import os
import sys
from pathlib import Path

from locust import events
from locust.argument_parser import LocustArgumentParser

# locust puts this file's folder on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.locust_scenarios import (
    AgentUser,
    BurstUser,
    ChatUser,
    DisconnectingUser,
    LongContextUser,
    SharedPrefixUser,
)
from loadtest.locust_tokens import install

__all__ = ["AgentUser", "BurstUser", "ChatUser", "DisconnectingUser", "LongContextUser", "SharedPrefixUser"]


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--model", default="", help="Model to ask; the first that /v1/models lists by default")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), is_secret=True, help="Bearer token (OPENAI_API_KEY)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="Tokens of an answer at most")
    parser.add_argument("--ignore-eos", action="store_true", help="Always generate --max-tokens (vLLM's extension)")
    parser.add_argument("--context-words", type=int, default=3000, help="Words of a long context or a shared prefix")
    parser.add_argument("--burst-seconds", type=float, default=30.0, help="Seconds between bursts")


install(events)
