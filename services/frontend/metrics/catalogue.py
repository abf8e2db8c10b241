"""Every metric of a frontend, described: `metrics` fills them, docs/metrics.md lists them.

Those that begin with gen_ai are OpenTelemetry's for GenAI servers, in Prometheus' spelling; their bounds are the
conventions', with finer and longer ones added. `model` is only ever a name that the frontend is configured with.
"""

from shared.metrics import Metric

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_PER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_DURATION_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36),
)
_USAGE_BUCKETS = tuple(float(2**power) for power in range(21))
_TEXT_BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")

TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to its first token here, of requests that succeeded. Operations are chat and "
    "text_completion, the provider is tandem.",
    _GEN_AI,
    _FIRST_TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "The mean time of a choice's tokens after its first, of requests that succeeded.",
    _GEN_AI,
    _PER_TOKEN_BUCKETS,
)
REQUEST_DURATION = Metric(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "From a request's arrival to its last byte. error_type is empty, or the reason of the failure, or client_left.",
    (*_GEN_AI, "error_type"),
    _DURATION_BUCKETS,
)
TOKEN_USAGE = Metric(
    "gen_ai_server_token_usage",
    "histogram",
    "Tokens of one request, input and output, as its usage tells (the conventions name only the client's twin).",
    (*_GEN_AI, "gen_ai_token_type"),
    _USAGE_BUCKETS,
)

INFO = Metric("tandem_frontend_info", "gauge", "1; what runs.", ("version",), sharing="livemax")
MODEL_INFO = Metric(
    "tandem_frontend_model_info",
    "gauge",
    "1; each model, and the longest context that all of its engines take.",
    ("model", "max_model_len"),
    sharing="livemax",
)
READY = Metric(
    "tandem_frontend_ready", "gauge", "1 while requests are welcome: as /health/ready tells.", sharing="livemin"
)
WORKERS = Metric("tandem_frontend_workers", "gauge", "Processes behind this port.")

REQUESTS = Metric(
    "tandem_frontend_requests_total",
    "counter",
    "HTTP requests by route and status; 499 where the client left before its answer.",
    ("route", "status"),
)
REQUESTS_IN_FLIGHT = Metric("tandem_frontend_requests_in_flight", "gauge", "HTTP requests being answered.")
STREAMS_IN_FLIGHT = Metric("tandem_frontend_streams_in_flight", "gauge", "Streamed answers being written.")
REJECTIONS = Metric(
    "tandem_frontend_rejections_total",
    "counter",
    "Requests answered with an error and no token: invalid, unauthorized, not_found, too_large, slow_body, key_limit, "
    "server_limit, engines_full, no_engine, draining, timeout, failed.",
    ("reason",),
)
DISCONNECTS = Metric(
    "tandem_frontend_disconnects_total",
    "counter",
    "Clients that left: waiting (before the first byte of an answer), streaming.",
    ("reason",),
)
STREAM_ERRORS = Metric(
    "tandem_frontend_stream_errors_total",
    "counter",
    "Streams that had begun and ended with an error, by the reasons of rejections.",
    ("reason",),
)
CACHED_TOKENS = Metric(
    "tandem_frontend_cached_tokens_total",
    "counter",
    "Prompt tokens that engines had cached, as usage tells.",
    ("model",),
)
REASONING_TOKENS = Metric(
    "tandem_frontend_reasoning_tokens_total",
    "counter",
    "Output tokens that were reasoning, as usage tells.",
    ("model",),
)

TEMPLATE_SECONDS = Metric(
    "tandem_frontend_template_seconds", "histogram", "Rendering one chat template.", ("model",), _TEXT_BUCKETS
)
TOKENIZE_SECONDS = Metric(
    "tandem_frontend_tokenize_seconds", "histogram", "Tokenizing one request's prompts.", ("model",), _TEXT_BUCKETS
)
DETOKENIZE_SECONDS = Metric(
    "tandem_frontend_detokenize_seconds",
    "histogram",
    "Turning the tokens of one message of an engine into text, for all its requests: detokenizer, stop strings, "
    "reasoning and tools.",
    ("model",),
    _TEXT_BUCKETS,
)
EVENT_LOOP_LAG = Metric(
    "tandem_frontend_event_loop_lag_seconds",
    "histogram",
    "How much later than asked a timer of the event loop fires: how long everything else waits.",
    buckets=_LAG_BUCKETS,
)

ENGINES_READY = Metric(
    "tandem_frontend_engines_ready", "gauge", "Engines that take requests now.", ("model",), sharing="livemin"
)
ENGINES = Metric(
    "tandem_frontend_engines",
    "gauge",
    "Engines that this frontend knows: connecting, ready, draining, refused, leaving (no longer named).",
    ("model", "state"),
    sharing="livemax",
)
GENERATIONS_IN_FLIGHT = Metric(
    "tandem_frontend_generations_in_flight", "gauge", "Choices that an engine has or that wait for one.", ("model",)
)
GENERATIONS_WITHOUT_ENGINE = Metric(
    "tandem_frontend_generations_without_engine", "gauge", "Of these, those that wait for an engine.", ("model",)
)
FAILOVERS = Metric(
    "tandem_frontend_failovers_total",
    "counter",
    "Times that a request went on elsewhere because its engine was lost: disconnected, silent, blocked (took no "
    "message), malformed, restarted, refused, removed.",
    ("model", "reason"),
)
HANDOVERS = Metric(
    "tandem_frontend_handovers_total",
    "counter",
    "Times that a request went on elsewhere because its engine drains.",
    ("model",),
)
OVERLOADS = Metric(
    "tandem_frontend_overloads_total", "counter", "Times that an engine refused a request for want of room.", ("model",)
)
GIVEN_UP = Metric(
    "tandem_frontend_given_up_total", "counter", "Requests that this side ended with an error.", ("model",)
)

POOL_REQUESTS_RUNNING = Metric(
    "tandem_frontend_pool_requests_running",
    "gauge",
    "Requests that run on a model's engines, of all frontends, as the engines last told.",
    ("model",),
    sharing="livemax",
)
POOL_REQUESTS_WAITING = Metric(
    "tandem_frontend_pool_requests_waiting", "gauge", "Those that wait there.", ("model",), sharing="livemax"
)
POOL_KV_USAGE = Metric(
    "tandem_frontend_pool_kv_usage_ratio",
    "gauge",
    "The share of KV blocks of a model's engines that requests use, 0 to 1.",
    ("model",),
    sharing="livemax",
)
POOL_TOKENS_PER_SECOND = Metric(
    "tandem_frontend_pool_tokens_per_second",
    "gauge",
    "Tokens that a model's engines generate, over the last seconds.",
    ("model",),
    sharing="livemax",
)

LINK_MESSAGES = Metric(
    "tandem_frontend_link_messages_total",
    "counter",
    "Messages on the links to engines: in, out.",
    ("model", "direction"),
)
LINK_BYTES = Metric("tandem_frontend_link_bytes_total", "counter", "Their bytes.", ("model", "direction"))
LINK_RECONNECTS = Metric(
    "tandem_frontend_link_reconnects_total", "counter", "Connections made anew to an address that had one.", ("model",)
)
LINK_BLOCKED = Metric(
    "tandem_frontend_link_blocked", "gauge", "Links whose send queue is full: the engine takes nothing.", ("model",)
)
HANDSHAKE_FAILURES = Metric(
    "tandem_frontend_handshake_failures_total",
    "counter",
    "Times that an engine was reached and no link came of it: a wrong key, most likely.",
    ("model",),
)
MALFORMED_MESSAGES = Metric(
    "tandem_frontend_malformed_messages_total", "counter", "Messages of engines that were dropped.", ("model",)
)
STALE_OUTPUTS = Metric(
    "tandem_frontend_stale_outputs_total", "counter", "Outputs for requests that had ended here already.", ("model",)
)

CATALOGUE = tuple(value for value in globals().values() if isinstance(value, Metric))
