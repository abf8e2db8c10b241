"""Conversations through chat templates: what reaches the template, and what is refused with its reason."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.frontend.output.tools import find_tool_parser
from services.frontend.prompts.chat_template import ChatTemplate, read_template_file
from services.frontend.prompts.errors import InvalidPrompt
from services.frontend.prompts.messages import ChatMessage

SHOW = "{{ messages | tojson }}"
PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def hf() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def messages(*fields: dict[str, Any]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(message) for message in fields]


def render(hf: PreTrainedTokenizerFast, template: str, *fields: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(hf, template).render(messages(*fields), **options)


def test_every_role_reaches_the_template(hf):
    roles = ["system", "user", "assistant", "tool", "function"]
    rendered = render(hf, PLAIN, *({"role": role, "content": "x"} for role in roles))
    assert rendered == "".join(f"<{role}>x</>" for role in roles) + "<assistant>"


def test_developer_becomes_system_where_the_template_does_not_know_it(hf):
    message = {"role": "developer", "content": "be brief"}
    assert render(hf, PLAIN, message, add_generation_prompt=False) == "<system>be brief</>"
    knows = PLAIN + "{# developer #}"
    assert render(hf, knows, message, add_generation_prompt=False) == "<developer>be brief</>"


def test_text_parts_are_joined(hf):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(hf, PLAIN, {"role": "user", "content": parts}, add_generation_prompt=False) == "<user>one\ntwo</>"


@pytest.mark.parametrize("part", ["image_url", "input_image", "input_audio", "video_url", "file"])
def test_other_parts_are_refused_by_name(part):
    with pytest.raises(ValueError, match=f"{part}: .* not supported"):
        messages({"role": "user", "content": [{"type": part, part: {}}]})


@pytest.mark.parametrize(
    "content", [5, {}, [5], [{}], [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": 1}]]
)
def test_malformed_content_is_refused(content):
    with pytest.raises(ValueError):
        messages({"role": "user", "content": content})


@pytest.mark.parametrize("fields", [{"content": ""}, {"content": None}, {}, {"content": []}])
def test_an_assistant_may_have_said_nothing(hf, fields):
    rendered = render(hf, PLAIN, {"role": "user", "content": "a"}, {"role": "assistant", **fields})
    assert rendered == "<user>a</><assistant></><assistant>"


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_others_must_say_something(hf, role):
    with pytest.raises(InvalidPrompt) as error:
        render(hf, PLAIN, {"role": role, "content": None})
    assert error.value.param == "messages[0].content"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_in_the_history_has_both_names(hf, name):
    template = "{{ messages[0].reasoning }}/{{ messages[0].reasoning_content }}"
    assert render(hf, template, {"role": "assistant", "content": "x", name: "why"}) == "why/why"


def test_tool_calls_and_answers_pass_through(hf):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    template = (
        "{{ messages[0].tool_calls[0].function.arguments.a + 1 }} {{ messages[1].tool_call_id }} {{ messages[1].name }}"
    )
    rendered = render(
        hf,
        template,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    )
    assert rendered == "2 c1 add"


def test_arguments_that_are_no_object_stay_text(hf):
    call = {"function": {"name": "add", "arguments": "{half"}}
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(hf, template, {"role": "assistant", "tool_calls": [call]}) == "{half"


@pytest.mark.parametrize("half", [r"\ud83d", r"\uDE00"])
def test_arguments_with_half_a_character_stay_text(hf, half):
    """Models write such escapes, answers carry them as they are, and clients send them back."""
    halves, both = rf'{{"a": "{half}"}}', r'{"a": "\ud83d\ude00"}'
    template = "{{ messages[0].tool_calls[0].function.arguments is string }}"
    for arguments, stays in ((halves, "True"), (both, "False")):
        call = {"function": {"name": "add", "arguments": arguments}}
        assert render(hf, template, {"role": "assistant", "tool_calls": [call]}) == stays


def test_variables_reach_the_template(hf):
    rendered = render(
        hf, "{{ enable_thinking }}", {"role": "user", "content": "a"}, variables={"enable_thinking": False}
    )
    assert rendered == "False"


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "tokenize",
        "conversation",
        "messages",
        "tools",
        "return_dict",
        "self",
        "bos_token",
        "eos_token",
        "range",
    ],
)
def test_variables_cannot_replace_what_the_server_decides(hf, name):
    with pytest.raises(InvalidPrompt, match=name) as error:
        render(hf, PLAIN, {"role": "user", "content": "a"}, variables={name: "{{ 1 }}"})
    assert error.value.param == "chat_template_kwargs"


def test_continue_final_message_leaves_it_open(hf):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So far"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(hf, PLAIN, *talk, **options) == "<user>a</><assistant>So far"
    with pytest.raises(InvalidPrompt) as error:
        render(hf, PLAIN, *talk, continue_final_message=True)
    assert error.value.param == "continue_final_message"


def test_what_the_template_raises_is_told(hf):
    with pytest.raises(InvalidPrompt, match="roles must alternate"):
        render(hf, "{{ raise_exception('roles must alternate') }}", {"role": "user", "content": "a"})


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ messages[9].content.x }}", "{{ none() }}"])
def test_a_template_that_fails_fails_this_request(hf, template):
    with pytest.raises(InvalidPrompt):
        render(hf, template, {"role": "user", "content": "a"})


def test_the_sandbox_holds(hf):
    with pytest.raises(InvalidPrompt):
        render(hf, "{{ ''.__class__.__mro__[1].__subclasses__() }}", {"role": "user", "content": "a"})


def test_no_template_is_said(hf):
    template = ChatTemplate(hf)
    assert not template.exists
    with pytest.raises(InvalidPrompt, match=r"no chat template.*--chat-template"):
        template.render(messages({"role": "user", "content": "a"}))


def test_template_files(tmp_path: Path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    assert "generation" in read_template_file(path)
    path.write_text("{% for %}")
    with pytest.raises(ValueError, match="line 1"):
        read_template_file(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_template_file(tmp_path / "none")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        read_template_file(path)


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% if tools %}{{ tools }}{% endif %}", True),
        ("{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ tools }}", True),
        ("{% for m in messages %}{% generation %}{{ m.content }}{{ tools }}{% endgeneration %}{% endfor %}", True),
        ("{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{{ tools }}{% endfor %}", True),
        ("{# tools #}the tools of {{ messages[0].tools }}{{ 'tools' }}", False),
        ("{% set tools = 'hammer' %}{{ tools }}", False),
        ("{% macro show(tools) %}{{ tools }}{% endmacro %}{{ show(messages) }}", False),
        (PLAIN, False),
    ],
)
def test_whether_a_template_has_a_place_for_tools(hf, template, reads):
    chat_template = ChatTemplate(hf, template)
    assert (chat_template.tools_text is not None) == reads
    if not reads:
        with pytest.raises(InvalidPrompt, match="no place for tools") as refused:
            chat_template.render(messages({"role": "user", "content": "x"}), tools=[{"type": "function"}])
        assert refused.value.param == "tools"


def test_a_template_of_its_own_for_tools():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    template = ChatTemplate(tokenizer)
    message = messages({"role": "user", "content": "x"})
    assert template.render(message) == "plain"
    assert template.render(message, tools=[{}, {}]) == "2 tools"


SMOLLM2_TOOLS = Path(__file__).resolve().parents[4] / "docs/chat-templates/chatml-hermes.jinja"


def test_the_template_with_tools_is_smollm2s_own_without_them(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    own, with_tools = ChatTemplate(tokenizer), ChatTemplate(tokenizer, read_template_file(SMOLLM2_TOOLS))
    for conversation in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": " Hello\n"},
            {"role": "system", "content": "Be long."},
            {"role": "user", "content": "So?"},
        ],
    ):
        for end in (True, False):
            expected = own.render(messages(*conversation), add_generation_prompt=end)
            assert with_tools.render(messages(*conversation), add_generation_prompt=end) == expected


def test_the_template_with_tools_shows_calls_and_their_answers(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    template = ChatTemplate(tokenizer, read_template_file(SMOLLM2_TOOLS))
    assert find_tool_parser(template.tools_text or "") == "hermes"
    calls = [{"id": str(n), "function": {"name": "f", "arguments": '{"a": "é"}'}} for n in range(2)]
    rendered = template.render(
        messages(
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "one", "tool_call_id": "0"},
            {"role": "tool", "content": "two", "tool_call_id": "1"},
        ),
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert "<tools>\n" + '{"type": "function", "function": {"name": "f"}}' + "\n</tools>" in rendered
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n" in rendered
    answers = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert rendered.endswith(f"<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>assistant\n")
