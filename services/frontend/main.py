"""One frontend process: loads its models' tokenizers, connects to their engines, serves HTTP."""

import contextlib
import logging
import os
import resource
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from services.frontend.engines.pool import EnginePool
from services.frontend.generation_config import load_sampling_defaults
from services.frontend.http.app import create_app
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.server import CannotListen, serve
from services.frontend.output.reasoning import REASONING_PARSERS
from services.frontend.output.tools import TOOL_PARSERS, find_tool_parser
from services.frontend.prompts.chat_template import ChatTemplate, read_template_file
from services.frontend.settings import FrontendSettings, ServedModel
from services.frontend.tokenizer import Tokenizer, TokenizerLoadError
from shared.cpu_cores import usable_cores
from shared.logging import adopt_libraries, configure_logging
from shared.protocol import Welcome
from shared.tracing import Tracing, start_tracing

logger = logging.getLogger(__name__)

_MAX_PROMPT_THREADS = 4


def run(settings: FrontendSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0 after an orderly end, 1 where it cannot start."""
    configure_logging(settings.log_level, "frontend")
    raise_open_files_limit()
    leave_torch_out()
    threads = min(_MAX_PROMPT_THREADS, usable_cores())
    # As many encode: see Tokenizer.encode.
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    tracing: Tracing | None = None
    with ThreadPoolExecutor(threads, thread_name_prefix="prompt") as executor:
        try:
            tracing = start_tracing("frontend")
            models = [load_model(served, settings, executor) for served in served_models(settings)]
            adopt_libraries()
            return serve(create_app(settings, models, tracing, check_grammars_at_once=True), settings)
        except (TokenizerLoadError, CannotListen, ValueError) as error:
            # Some libraries' messages have paragraphs.
            logger.critical("%s", " ".join(str(error).split()))
            return 1
        finally:
            if tracing is not None:
                tracing.close()


def leave_torch_out() -> None:
    """Have transformers believe that there is no torch, as in the frontend's image, where an engine's installation lies
    beside this one: its tokenizers would import it, which takes two seconds and 250 MB, and use nothing of it."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def raise_open_files_limit() -> None:
    """Take as many descriptors as the system gives: each engine needs four, each client one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than it names
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def served_models(settings: FrontendSettings) -> list[ServedModel]:
    """The models of `models`, or the one of the flat fields. Raises ValueError where there is none, or both."""
    if settings.models:
        if settings.model:
            raise ValueError("--model and --models are two ways to say one thing: use one of them")
        return settings.models
    if not settings.model:
        raise ValueError("--model is needed: a local folder, or a name on the hub")
    return [
        ServedModel(
            model=settings.model,
            served_model_name=settings.served_model_name,
            revision=settings.revision,
            reasoning_parser=settings.reasoning_parser,
            tool_call_parser=settings.tool_call_parser,
            chat_template=settings.chat_template,
            discovery=settings.discovery,
            engine_addresses=settings.engine_addresses,
            engine_service=settings.engine_service,
            engine_namespace=settings.engine_namespace,
            engine_port_name=settings.engine_port_name,
        )
    ]


def load_model(served: ServedModel, settings: FrontendSettings, executor: Executor) -> LoadedModel:
    """Load one model's tokenizer and template. Raises TokenizerLoadError, or ValueError for a setting."""
    if served.reasoning_parser is not None and served.reasoning_parser not in REASONING_PARSERS:
        raise ValueError(
            f"there is no reasoning parser {served.reasoning_parser!r}; there are {', '.join(REASONING_PARSERS)}"
        )
    if served.tool_call_parser not in ("auto", "none", *TOOL_PARSERS):
        raise ValueError(
            f"there is no tool-call parser {served.tool_call_parser!r}; there are auto, none, {', '.join(TOOL_PARSERS)}"
        )
    text = None if served.chat_template is None else read_template_file(served.chat_template)
    tokenizer = Tokenizer.load(served.model, revision=served.revision, trust_remote_code=settings.trust_remote_code)
    template = ChatTemplate(tokenizer.hf, text)
    names = served.served_model_name or [served.model]
    return LoadedModel(
        names=names,
        root=served.model,
        tokenizer=tokenizer,
        template=template,
        engines=EnginePool(names[0], settings, served, agrees_with(tokenizer)),
        executor=executor,
        reasoning_parser=served.reasoning_parser,
        reasoning_tags=settings.reasoning_tags,
        tool_call_parser=_tool_call_parser(served.tool_call_parser, template),
        defaults=load_sampling_defaults(settings.generation_config, served.model, served.revision),
    )


def _tool_call_parser(name: str, template: ChatTemplate) -> str | None:
    if name != "auto":
        return None if name == "none" else name
    if template.tools_text is None:
        return None
    found = find_tool_parser(template.tools_text)
    if found is None:
        logger.warning(
            "The chat template reads tools, but not which format its calls have: requests with tools are refused until "
            "--tool-call-parser names it (%s)",
            ", ".join(TOOL_PARSERS),
        )
    else:
        logger.info("Tool calls are read in the format %s, which the chat template speaks of", found)
    return found


def agrees_with(tokenizer: Tokenizer) -> Callable[[Welcome], str | None]:
    """Whether an engine's model goes with the tokenizer: why not, or None."""

    def check(welcome: Welcome) -> str | None:
        if tokenizer.vocab_size > welcome.limits.vocab_size:
            return (
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model's vocabulary only "
                f"{welcome.limits.vocab_size}: they are not of one model"
            )
        eos = tokenizer.eos_token_id
        if eos is not None and eos not in welcome.limits.eos_token_ids:
            # Not an error: a base model's tokenizer may name another one than its generation_config does.
            logger.warning(
                "The tokenizer's eos token is %d, but model %s ends at %s",
                eos,
                welcome.model,
                welcome.limits.eos_token_ids,
            )
        return None

    return check
