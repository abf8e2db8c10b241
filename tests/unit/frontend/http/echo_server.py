"""A frontend process over the fake pool, for tests of start and stop: TOKENIZER_FOLDER and its settings as flags.

The prompt "slow…" is echoed at 20 ms a token, "hang…" never ends.
"""

import asyncio
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from echo_app import EchoPool
from pydantic_settings import CliApp

from services.frontend.generation import Generation
from services.frontend.http.app import create_app
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.server import serve
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.settings import FrontendSettings
from services.frontend.tokenizer import Tokenizer


class PacedPool(EchoPool):
    async def pace(self, generation: Generation, number: int) -> None:
        prompt = self.tokenizer.decode(generation.prompt_token_ids)
        if prompt.startswith("hang") and number == 2:
            await asyncio.Event().wait()
        await asyncio.sleep(0.02 if prompt.startswith("slow") else 0)


def main() -> int:
    logging.basicConfig(level="INFO")
    settings = CliApp.run(FrontendSettings, cli_args=sys.argv[2:])
    tokenizer = Tokenizer.load(Path(sys.argv[1]))
    with ThreadPoolExecutor(1) as executor:
        model = LoadedModel(["echo"], "echo", tokenizer, ChatTemplate(tokenizer.hf), PacedPool(tokenizer), executor)
        return serve(create_app(settings, [model]), settings)


if __name__ == "__main__":
    sys.exit(main())
