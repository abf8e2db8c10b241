"""The frontend's settings: environment variables TANDEM_…, the same names as flags, printed by --help."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from shared.settings import CommaSeparated, ModelSettings, ServiceSettings
from shared.structured_output import MAX_VALUE_LENGTH

_DISCOVERY = (
    "static: engine_addresses as they are; dns: every address of one name, asked again and again; "
    "kubernetes: the endpoints of engine_service, watched."
)


class EnginePoolSettings(BaseModel):
    """Where one model's engines are."""

    discovery: Literal["static", "dns", "kubernetes"] = Field("static", description=_DISCOVERY)
    engine_addresses: list[str] = Field(
        default_factory=lambda: ["127.0.0.1:5555"],
        description="host:port of the engines' links; one name with discovery dns.",
    )
    engine_service: str = Field("", description="With discovery kubernetes: the name of the engines' Service.")
    engine_namespace: str = Field("", description="With discovery kubernetes: its namespace; this pod's by default.")
    engine_port_name: str = Field("link", description="With discovery kubernetes: the name of the Service's port.")


class ServedModel(EnginePoolSettings):
    """One of several models of a frontend: `--models` takes a JSON list of these."""

    model: str = Field(description="The tokenizer's source: a local folder, or a name on the hub.")
    served_model_name: list[str] = Field(default_factory=list, description="Names that clients use.")
    revision: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str = "auto"
    chat_template: Path | None = None


class FrontendSettings(ModelSettings, ServiceSettings):
    """What one frontend process serves. Either one model by the flat fields, or several by `models`."""

    host: str = Field("127.0.0.1", description="Address that HTTP binds.")
    port: int = Field(8000, ge=0, le=65535, description="Port that HTTP binds; 0 takes a free one.")
    workers: int = Field(
        1, ge=1, le=64, description="Processes that share the port, each with links of its own to the engines."
    )
    discovery: Literal["static", "dns", "kubernetes"] = Field("static", description=_DISCOVERY)
    engine_addresses: CommaSeparated[list[str]] = Field(
        default_factory=lambda: ["127.0.0.1:5555"],
        description="host:port of the engines' links; one name with discovery dns.",
    )
    engine_service: str = Field("", description="With discovery kubernetes: the name of the engines' Service.")
    engine_namespace: str = Field("", description="With discovery kubernetes: its namespace; this pod's by default.")
    engine_port_name: str = Field("link", description="With discovery kubernetes: the name of the Service's port.")
    dns_interval: float = Field(2.0, gt=0, description="Seconds between two look-ups with discovery dns.")
    routing: Literal["prefix_aware", "least_loaded", "round_robin"] = Field(
        "prefix_aware",
        description="How an engine is chosen. prefix_aware: by what its cache holds of the prompt, and its load.",
    )
    routing_prefix_weight: float = Field(
        2.0, ge=0, description="With prefix_aware: what a prompt token costs that the engine does not hold."
    )
    routing_load_weight: float = Field(
        1.0, ge=0, description="With prefix_aware: what a token of the work costs that the engine has ahead of it."
    )
    routing_memory_weight: float = Field(
        1.0, ge=0, description="With prefix_aware: what a prompt token costs that the engine's free blocks cannot take."
    )
    models: list[ServedModel] = Field(
        default_factory=list, description="Several models, as a JSON list, instead of --model."
    )
    reasoning_parser: str | None = Field(
        None, description="Splits thinking from the answer: qwen3, deepseek_r1 or tagged."
    )
    tool_call_parser: str = Field(
        "auto",
        description="The format of the model's tool calls: hermes, llama3_json, mistral, deepseek_v3 or pythonic. auto "
        "takes the one that the chat template speaks of; none: requests with tools are refused.",
    )
    reasoning_tags: CommaSeparated[tuple[str, str]] = Field(
        ("<think>", "</think>"), description="The tags of the parser `tagged`."
    )
    reasoning_fields: CommaSeparated[list[Literal["reasoning", "reasoning_content"]]] = Field(
        default_factory=lambda: ["reasoning", "reasoning_content"],
        description="Fields that carry the reasoning.",
    )
    generation_config: str = Field(
        "auto",
        description="Sampling defaults: auto (the model's generation_config.json), vllm (none), or a folder with one.",
    )
    chat_template: Path | None = Field(None, description="A Jinja file instead of the model's own chat template.")
    api_key: CommaSeparated[list[str]] = Field(
        default_factory=list, description="Keys that clients must send as a bearer token; none: open to all."
    )
    api_key_file: Path | None = Field(None, description="A file of keys, one a line, read at start.")
    allowed_origins: CommaSeparated[list[str]] = Field(
        default_factory=list, description="CORS origins; none: CORS is off."
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Larger request bodies are refused (413).")
    max_n: int = Field(64, ge=1, description="Choices of one prompt at most.")
    max_choices: int = Field(256, ge=1, description="Choices of one request at most: its prompts times n.")
    max_stop: int = Field(16, ge=1, description="Stop strings of one request at most.")
    max_grammar_bytes: int = Field(
        128 * 1024,
        ge=1024,
        le=MAX_VALUE_LENGTH,
        description="Of one schema, regular expression or grammar; larger ones are refused (400).",
    )
    grammar_compile_seconds: float = Field(
        0.5, gt=0, description="CPU time that one grammar may take to compile; those that need more are refused (400)."
    )
    structured_output_in_reasoning: bool = Field(
        False, description="Structured output begins with the first token, the reasoning included, instead of after it."
    )
    max_concurrent_requests: int = Field(
        4096,
        ge=1,
        description="Requests in flight in one frontend process, each choice counted; beyond it 429. Every worker of "
        "every pod has as many.",
    )
    max_requests_per_key: int | None = Field(
        None,
        ge=1,
        description="Requests of one API key that one frontend process answers at once; beyond it 429. Every worker of "
        "every pod counts for itself.",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds until a request is given up (504); one that names a shorter timeout has its own.",
    )
    trace_content: bool = Field(
        False, description="Traces of sampled requests hold the texts too: what was asked and what was answered."
    )
    trace_errors: bool = Field(
        False,
        description="Keep this side's spans of requests that fail, whether they are sampled or not. To be able to, it "
        "records every request: a tenth of a short request's CPU time.",
    )
    trace_slower_than: float | None = Field(
        None, gt=0, description="Keep this side's spans of requests that take longer than so many seconds, too."
    )
    max_failovers: int = Field(2, ge=0, description="Engines that may die under one request before it is given up.")
    quarantine_time: float = Field(
        600.0,
        ge=0,
        description="Seconds for which a prompt that more engines died under is refused, here and by every engine that "
        "this frontend knows; 0: not at all.",
    )
    heartbeat_interval: float = Field(1.0, gt=0, description="Seconds between heartbeats on an idle link.")
    heartbeat_timeout: float = Field(
        5.0, gt=0, description="Seconds of silence after which an engine is taken for dead."
    )
    no_engine_timeout: float = Field(
        10.0, ge=0, description="Seconds that a running stream waits for another engine when none is left."
    )
    stream_keep_alive: float = Field(
        15.0,
        ge=0,
        description="Seconds without a chunk after which a stream sends a comment, lest proxies cut it; 0: never.",
    )
    drain_delay: float = Field(0.0, ge=0, description="Seconds from SIGTERM, not ready, to refusing connections.")
    shutdown_grace: float = Field(30.0, ge=0, description="Seconds that streams get to finish after SIGTERM.")
    ready_file: Path | None = Field(
        None, description="A file that is written, with the bound port as JSON, once HTTP is served."
    )
    listen_fd: int | None = Field(
        None,
        ge=0,
        description="An inherited listening socket to serve instead of host and port; several processes may share one.",
    )
