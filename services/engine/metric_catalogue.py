"""Every metric of an engine, described: `metrics` fills them, docs/metrics.md lists them."""

from shared.metrics import Metric

# A step's parts take from some ten microseconds (schedule) to seconds (a long prompt on a CPU).
_PHASE_BUCKETS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_REQUEST_BUCKETS = tuple(float(2**power) for power in range(12))
_TOKEN_BUCKETS = tuple(float(2**power) for power in range(16))

INFO = Metric("tandem_engine_info", "gauge", "1; what runs.", ("version", "model", "fingerprint", "executor"))
KV_CACHE_INFO = Metric(
    "tandem_engine_kv_cache_info",
    "gauge",
    "1; the KV cache's shape, under the labels that the Gateway API inference extension reads.",
    ("block_size", "num_gpu_blocks"),
)
READY = Metric("tandem_engine_ready", "gauge", "1 while it takes requests; 0 while it loads, drains or hangs.")

REQUESTS_RUNNING = Metric("tandem_engine_requests_running", "gauge", "Requests that the steps compute now.")
REQUESTS_WAITING = Metric(
    "tandem_engine_requests_waiting", "gauge", "Requests that wait for room, preempted ones included."
)
REQUESTS_PREPARING = Metric(
    "tandem_engine_requests_preparing", "gauge", "Requests that wait for their grammar, before they wait for room."
)
WAITING_TOKENS = Metric("tandem_engine_waiting_tokens", "gauge", "Tokens of prompts that no step has computed yet.")
REQUESTS_RECEIVED = Metric(
    "tandem_engine_requests_received_total", "counter", "Requests that came over the link, resumed ones included."
)
REQUESTS_REFUSED = Metric(
    "tandem_engine_requests_refused_total",
    "counter",
    "Requests that were never queued: overloaded (the waiting queue is full), invalid, draining, quarantined (engines "
    "died under the prompt).",
    ("reason",),
)
REQUESTS_FINISHED = Metric(
    "tandem_engine_requests_finished_total",
    "counter",
    "Requests that left the queue or the steps: stop, length, abort, error, handed_over.",
    ("reason",),
)
QUEUE_SECONDS = Metric(
    "tandem_engine_queue_seconds",
    "histogram",
    "From a request's arrival at this engine to the step that first computes some of it.",
    buckets=_WAIT_BUCKETS,
)
PREFILL_SECONDS = Metric(
    "tandem_engine_prefill_seconds",
    "histogram",
    "From that step's beginning to the request's first output.",
    buckets=_WAIT_BUCKETS,
)

PROMPT_TOKENS = Metric(
    "tandem_engine_prompt_tokens_total", "counter", "Prompt tokens of requests that have had their first output."
)
CACHED_TOKENS = Metric("tandem_engine_cached_tokens_total", "counter", "Of these, what the prefix cache held.")
GENERATED_TOKENS = Metric("tandem_engine_generated_tokens_total", "counter", "Tokens that were sampled.")
PREFIX_QUERIED_TOKENS = Metric(
    "tandem_engine_prefix_queried_tokens_total",
    "counter",
    "Tokens looked up in the prefix cache: those of every admission, of resumed and preempted requests too.",
)
PREFIX_HIT_TOKENS = Metric("tandem_engine_prefix_hit_tokens_total", "counter", "Of these, what was found there.")

KV_BLOCKS = Metric("tandem_engine_kv_blocks", "gauge", "KV blocks altogether.")
KV_BLOCKS_FREE = Metric("tandem_engine_kv_blocks_free", "gauge", "KV blocks that no request uses.")
KV_BLOCKS_CACHED = Metric(
    "tandem_engine_kv_blocks_cached", "gauge", "KV blocks, used or free, whose content requests can share."
)
KV_USAGE = Metric("tandem_engine_kv_usage_ratio", "gauge", "The share of KV blocks that requests use, 0 to 1.")
PREEMPTIONS = Metric(
    "tandem_engine_preemptions_total", "counter", "Times that a request gave up its blocks and waited again."
)

STEP_SECONDS = Metric(
    "tandem_engine_step_seconds",
    "histogram",
    "One turn of the loop with a step: what arrived is taken in, the step runs, its outputs are handed over.",
    buckets=_STEP_BUCKETS,
)
STEP_PHASE_SECONDS = Metric(
    "tandem_engine_step_phase_seconds",
    "histogram",
    "Parts of a step: schedule; forward (the model); sample; output (stops and accounts); send (encoding and sending "
    "on the link's own thread, beside the next step).",
    ("phase",),
    _PHASE_BUCKETS,
)
BATCH_REQUESTS = Metric("tandem_engine_batch_requests", "histogram", "Requests in one step.", buckets=_REQUEST_BUCKETS)
BATCH_TOKENS = Metric(
    "tandem_engine_batch_tokens", "histogram", "Tokens that one step computes.", buckets=_TOKEN_BUCKETS
)

FRONTENDS = Metric("tandem_engine_frontends", "gauge", "Frontend processes that are connected.")
FRONTENDS_LOST = Metric(
    "tandem_engine_frontends_lost_total", "counter", "Frontends that were taken for dead, their requests aborted."
)
LINK_MESSAGES = Metric("tandem_engine_link_messages_total", "counter", "Messages on the link: in, out.", ("direction",))
LINK_BYTES = Metric("tandem_engine_link_bytes_total", "counter", "Their bytes.", ("direction",))
LINK_RECONNECTS = Metric(
    "tandem_engine_link_reconnects_total", "counter", "Times that a frontend known to this engine said HELLO again."
)
LINK_QUEUE = Metric(
    "tandem_engine_link_queue_messages",
    "gauge",
    "What waits: inbox (for the loop), outbox (for the link's thread), backlog (for frontends that do not read).",
    ("queue",),
)
LINK_BACKLOG_BYTES = Metric(
    "tandem_engine_link_backlog_bytes", "gauge", "Bytes that wait for frontends that do not read."
)
MALFORMED_MESSAGES = Metric(
    "tandem_engine_malformed_messages_total", "counter", "Messages of frontends that were dropped."
)
HANDSHAKE_FAILURES = Metric(
    "tandem_engine_handshake_failures_total",
    "counter",
    "Connections to the link that came to nothing: unknown_key (of a frontend), wrong_engine_key (it knows another), "
    "encryption_mismatch (one side has --link-keys), protocol_error, unfinished (closed or silent before its end).",
    ("reason",),
)

CATALOGUE = tuple(value for value in globals().values() if isinstance(value, Metric))
