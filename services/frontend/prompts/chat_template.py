"""One model's chat template: a conversation becomes the text that the model continues.

transformers renders it, in Jinja's sandbox. Its neighbours are messages.py (what goes in) and build.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from services.frontend.prompts.errors import InvalidPrompt
from services.frontend.prompts.messages import ChatMessage, template_messages

# What apply_chat_template takes for itself, and what the request says in fields of its own. A client that could
# set them through chat_template_kwargs could replace the template or the conversation.
_RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "chat_template",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "tokenizer",
        "self",
        # What the template may rely on: the model's own tokens, and the functions that transformers gives it.
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
        "raise_exception",
        "strftime_now",
        "range",
        "namespace",
        "dict",
        "cycler",
        "joiner",
        "lipsum",
    }
)


class ChatTemplate:
    """Renders conversations with the tokenizer's own template, or with `text` instead of it."""

    def __init__(self, hf_tokenizer: Any, text: str | None = None) -> None:
        self._hf = hf_tokenizer
        self._text = text if text is not None else _own_template(hf_tokenizer)
        # Some models have a template of its own for conversations with tools.
        tools_text = text if text is not None else _own_template(hf_tokenizer, with_tools=True)
        self._tools_text = tools_text if tools_text is not None and reads_tools(tools_text) else None
        self._knows_developer = self._text is not None and "developer" in self._text

    @property
    def exists(self) -> bool:
        return self._text is not None

    @property
    def tools_text(self) -> str | None:
        """The template for conversations with tools; None where it has no place for them."""
        return self._tools_text

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: list[dict[str, str]] | None = None,
        variables: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """The prompt's text. `variables` are the request's chat_template_kwargs. Raises InvalidPrompt."""
        if self._text is None:
            raise InvalidPrompt(
                "this model has no chat template, so it takes no conversation: use /v1/completions, "
                "or start the server with --chat-template FILE",
                "messages",
            )
        if tools and self._tools_text is None:
            raise InvalidPrompt(
                "this model's chat template has no place for tools, so the model would not hear of them: leave tools "
                "out, send tool_choice none, or start the server with a --chat-template that reads `tools`",
                "tools",
            )
        if not messages:
            raise InvalidPrompt("messages must hold at least one message", "messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidPrompt(
                "continue_final_message needs add_generation_prompt set to false: a message is either continued "
                "or a new one begun",
                "continue_final_message",
            )
        variables = dict(variables or {})
        for name in variables:
            if name in _RESERVED:
                raise InvalidPrompt(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")
        conversation = template_messages(messages, developer_role=self._knows_developer)
        try:
            rendered = self._hf.apply_chat_template(
                conversation,
                chat_template=self._tools_text if tools else self._text,
                tools=list(tools) or None,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise InvalidPrompt(f"the chat template refused the conversation: {error.message}", "messages") from error
        except Exception as error:
            # A template is a program that the client's data runs through: whatever it raises is about that data
            # (a type it cannot add, a field it misses), and the request's alone.
            raise InvalidPrompt(f"the chat template cannot render the conversation: {error}", "messages") from error
        return str(rendered)


def _own_template(hf_tokenizer: Any, *, with_tools: bool = False) -> str | None:
    try:
        return hf_tokenizer.get_chat_template(None, [{}] if with_tools else None)
    except ValueError:  # no template, or several of which none is the default
        return None


def reads_tools(template: str) -> bool:
    """Whether a template reads the variable `tools`, or may: one that cannot be parsed is given the benefit."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    try:
        return "tools" in jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError:
        return "tools" in template


class _GenerationTag(jinja2.ext.Extension):
    """transformers' {% generation %}, which marks what an assistant said; for reading only."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template_file(path: Path) -> str:
    """A template file's text. Raises ValueError that says what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        jinja2.Environment().parse(text)
    except OSError as error:
        raise ValueError(f"the chat template {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the chat template {path} is not UTF-8") from error
    except jinja2.TemplateSyntaxError as error:
        # transformers' own tags ({% generation %}, loop controls) are unknown to a plain environment.
        if "unknown tag" not in str(error):
            raise ValueError(f"the chat template {path} is not valid Jinja: line {error.lineno}: {error}") from error
        text = path.read_text(encoding="utf-8")
    return text
