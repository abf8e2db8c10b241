"""The panels of the chart's Grafana dashboard: what each asks and means. `generate_dashboard` lays them out.

Labels beside the services' own are those that the chart's PodMonitors add: namespace, pod, app_kubernetes_io_instance
(the release) and tandem_pool.
"""

from dataclasses import dataclass

# What every query selects by; the variables are above the panels.
POD = 'namespace=~"$namespace", app_kubernetes_io_instance=~"$release"'
MODEL = f'{POD}, model=~"$model"'
GEN_AI = f'{POD}, gen_ai_request_model=~"$model"'
ENGINE = f'{POD}, tandem_pool=~"$pool"'


@dataclass(frozen=True)
class Panel:
    """A graph over time, or with `kind` "stat" one number. `queries` are pairs of PromQL and legend."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    stacked: bool = False
    # Values from which a stat is orange and red.
    warn: float | None = None
    alarm: float | None = None
    # Where less is worse.
    falling: bool = False
    ceiling: float | None = None


def rate(metric: str, selector: str) -> str:
    return f"rate({metric}{{{selector}}}[$__rate_interval])"


def quantile(q: float, metric: str, selector: str, by: str) -> str:
    return f"histogram_quantile({q}, sum by ({by}, le) ({rate(f'{metric}_bucket', selector)}))"


def quantiles(metric: str, selector: str, by: str) -> tuple[tuple[str, str], ...]:
    return tuple((quantile(q, metric, selector, by), f"{{{{{by}}}}} p{q * 100:g}") for q in (0.5, 0.95, 0.99))


def mean(metric: str, selector: str, by: str) -> str:
    return f"sum by ({by}) ({rate(f'{metric}_sum', selector)}) / sum by ({by}) ({rate(f'{metric}_count', selector)})"


FAILED = f'{POD}, status=~"5.."'
FRONTEND = f'{POD}, app_kubernetes_io_component="frontend"'
_REQUESTS = "tandem_frontend_requests_total"
# What failed on this side: a request, or a stream after its first byte.
ERROR_RATIO = (
    f"((sum({rate(_REQUESTS, FAILED)}) or vector(0)) "
    f"+ (sum({rate('tandem_frontend_stream_errors_total', POD)}) or vector(0))) / sum({rate(_REQUESTS, POD)})"
)
HIT_RATIO = (
    f"sum by (tandem_pool) ({rate('tandem_engine_prefix_hit_tokens_total', ENGINE)}) "
    f"/ sum by (tandem_pool) ({rate('tandem_engine_prefix_queried_tokens_total', ENGINE)})"
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel(
            "Engines ready",
            "Engines that take requests now, as the frontend that sees the fewest tells; by model.",
            "none",
            ((f"min by (model) (tandem_frontend_engines_ready{{{MODEL}}})", "{{model}}"),),
            "stat",
            warn=2,
            alarm=1,
            falling=True,
        ),
        Panel(
            "Waiting requests",
            "Requests in the engines' queues. A queue that stays is a lack of engines.",
            "none",
            ((f"sum(tandem_engine_requests_waiting{{{ENGINE}}})", ""),),
            "stat",
            warn=1,
            alarm=100,
        ),
        Panel(
            "Output tokens per second",
            "What all engines generate.",
            "none",
            ((f"sum({rate('tandem_engine_generated_tokens_total', ENGINE)})", ""),),
            "stat",
        ),
        Panel(
            "Time to first token, p95",
            "Of requests that succeeded, as the frontend saw them.",
            "s",
            (
                (
                    quantile(0.95, "gen_ai_server_time_to_first_token_seconds", GEN_AI, "gen_ai_request_model"),
                    "{{gen_ai_request_model}}",
                ),
            ),
            "stat",
            warn=2,
            alarm=10,
        ),
        Panel(
            "Errors",
            "The share of requests answered with 5xx, or that broke off after their first byte.",
            "percentunit",
            ((ERROR_RATIO, ""),),
            "stat",
            warn=0.01,
            alarm=0.05,
        ),
        Panel(
            "Fullest KV cache",
            "The share of KV blocks that requests use, of the engine that has the fewest left.",
            "percentunit",
            ((f"max(tandem_engine_kv_usage_ratio{{{ENGINE}}})", ""),),
            "stat",
            warn=0.9,
            alarm=0.98,
        ),
    ),
    "Users": (
        Panel(
            "Time to first token",
            "From a request's arrival at a frontend to its first token there. Grows with queue and prompt.",
            "s",
            quantiles("gen_ai_server_time_to_first_token_seconds", GEN_AI, "gen_ai_request_model"),
        ),
        Panel(
            "Time per output token",
            "The mean of a choice's tokens after its first: how fast text runs.",
            "s",
            quantiles("gen_ai_server_time_per_output_token_seconds", GEN_AI, "gen_ai_request_model"),
        ),
        Panel(
            "Duration of requests",
            "From a request's arrival to its last byte, by how it ended (empty: well).",
            "s",
            (
                (quantile(0.5, "gen_ai_server_request_duration_seconds", GEN_AI, "error_type"), "p50 {{error_type}}"),
                (quantile(0.95, "gen_ai_server_request_duration_seconds", GEN_AI, "error_type"), "p95 {{error_type}}"),
            ),
        ),
        Panel(
            "Requests",
            "HTTP requests per second by status. 499: the client left before its answer.",
            "reqps",
            ((f"sum by (status) ({rate(_REQUESTS, POD)})", "{{status}}"),),
            stacked=True,
        ),
        Panel(
            "Errors and broken streams",
            "5xx answers, and streams that ended with an error after their first byte, per second.",
            "reqps",
            (
                (f"sum by (status) ({rate(_REQUESTS, FAILED)})", "{{status}}"),
                (f"sum by (reason) ({rate('tandem_frontend_stream_errors_total', POD)})", "stream: {{reason}}"),
            ),
        ),
        Panel(
            "Rejections",
            "Requests answered with an error and no token, per second: whether the client's fault or a limit of ours.",
            "reqps",
            ((f"sum by (reason) ({rate('tandem_frontend_rejections_total', POD)})", "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens of requests",
            "Input and output tokens per second, as usage tells.",
            "none",
            (
                (
                    "sum by (gen_ai_request_model, gen_ai_token_type) "
                    f"({rate('gen_ai_server_token_usage_sum', GEN_AI)})",
                    "{{gen_ai_request_model}} {{gen_ai_token_type}}",
                ),
            ),
        ),
        Panel(
            "Clients that left",
            "Per second: before the first byte of their answer, or while it streamed.",
            "reqps",
            ((f"sum by (reason) ({rate('tandem_frontend_disconnects_total', POD)})", "{{reason}}"),),
        ),
        Panel(
            "Requests given up",
            "Requests that a frontend ended with an error because no engine could go on with them, per second.",
            "reqps",
            ((f"sum by (model) ({rate('tandem_frontend_given_up_total', MODEL)})", "{{model}}"),),
        ),
    ),
    "Engines": (
        Panel(
            "Running and waiting",
            "Running requests are capped by max_num_seqs and by the KV cache; what is beyond waits. Others wait for a "
            "grammar.",
            "none",
            (
                (f"sum by (tandem_pool) (tandem_engine_requests_running{{{ENGINE}}})", "{{tandem_pool}} running"),
                (f"sum by (tandem_pool) (tandem_engine_requests_waiting{{{ENGINE}}})", "{{tandem_pool}} waiting"),
                (f"sum by (tandem_pool) (tandem_engine_requests_preparing{{{ENGINE}}})", "{{tandem_pool}} grammar"),
            ),
        ),
        Panel(
            "Time in the queue",
            "From a request's arrival at an engine to the step that first computes some of it.",
            "s",
            quantiles("tandem_engine_queue_seconds", ENGINE, "tandem_pool"),
        ),
        Panel(
            "Tokens",
            "Per second and engine: generated, and prompt tokens of requests that had their first output.",
            "none",
            (
                (f"sum by (pod) ({rate('tandem_engine_generated_tokens_total', ENGINE)})", "{{pod}} generated"),
                (f"sum by (pod) ({rate('tandem_engine_prompt_tokens_total', ENGINE)})", "{{pod}} prompt"),
            ),
        ),
        Panel(
            "KV cache in use",
            "The share of KV blocks that requests use. Near 1, requests wait or are preempted.",
            "percentunit",
            ((f"max by (pod) (tandem_engine_kv_usage_ratio{{{ENGINE}}})", "{{pod}}"),),
            ceiling=1,
        ),
        Panel(
            "Prefix cache's hits",
            "The share of looked-up tokens whose KV was there. Falls where routing scatters what shares a prefix.",
            "percentunit",
            ((HIT_RATIO, "{{tandem_pool}}"),),
            ceiling=1,
        ),
        Panel(
            "Preemptions and refusals",
            "Per second: requests that gave up their blocks and waited again, and requests that were never queued.",
            "reqps",
            (
                (
                    f"sum by (tandem_pool) ({rate('tandem_engine_preemptions_total', ENGINE)})",
                    "{{tandem_pool}} preempted",
                ),
                (f"sum by (reason) ({rate('tandem_engine_requests_refused_total', ENGINE)})", "refused: {{reason}}"),
            ),
        ),
        Panel(
            "Where a step's time goes",
            "Seconds of each phase in one step, on average. send runs beside the next step. Neither forward nor "
            "sample: the accelerator waits.",
            "s",
            (
                (
                    f"sum by (phase) ({rate('tandem_engine_step_phase_seconds_sum', ENGINE)}) / on () group_left () "
                    f"sum({rate('tandem_engine_step_seconds_count', ENGINE)})",
                    "{{phase}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Step",
            "One turn of the engine's loop: about the time between a stream's tokens.",
            "s",
            quantiles("tandem_engine_step_seconds", ENGINE, "tandem_pool"),
        ),
        Panel(
            "Batch",
            "Requests and tokens of one step, on average.",
            "none",
            (
                (mean("tandem_engine_batch_requests", ENGINE, "tandem_pool"), "{{tandem_pool}} requests"),
                (mean("tandem_engine_batch_tokens", ENGINE, "tandem_pool"), "{{tandem_pool}} tokens"),
            ),
        ),
    ),
    "Link": (
        Panel(
            "Messages",
            "Per second over the links, as the engines count them.",
            "none",
            ((f"sum by (direction) ({rate('tandem_engine_link_messages_total', ENGINE)})", "{{direction}}"),),
        ),
        Panel(
            "Bytes",
            "Per second over the links, as the engines count them.",
            "Bps",
            ((f"sum by (direction) ({rate('tandem_engine_link_bytes_total', ENGINE)})", "{{direction}}"),),
        ),
        Panel(
            "Failovers and hand-overs",
            "Requests that went on from another engine, per second: their engine was lost (failover), or it drains.",
            "reqps",
            (
                (f"sum by (reason) ({rate('tandem_frontend_failovers_total', MODEL)})", "failover: {{reason}}"),
                (f"sum({rate('tandem_frontend_handovers_total', MODEL)})", "hand-over"),
            ),
        ),
        Panel(
            "Trouble on the link",
            "Per second: connections made anew, frontends taken for dead, malformed messages, failed handshakes "
            "(unfinished ones may be scans of ports; the other reasons are keys).",
            "none",
            (
                (f"sum({rate('tandem_frontend_link_reconnects_total', MODEL)})", "reconnects"),
                (f"sum({rate('tandem_engine_frontends_lost_total', ENGINE)})", "frontends lost"),
                (f"sum({rate('tandem_engine_malformed_messages_total', ENGINE)})", "malformed, of frontends"),
                (f"sum({rate('tandem_frontend_malformed_messages_total', MODEL)})", "malformed, of engines"),
                (
                    f"sum by (reason) ({rate('tandem_engine_handshake_failures_total', ENGINE)})",
                    "handshake: {{reason}}",
                ),
            ),
        ),
        Panel(
            "What waits on the link",
            "Messages: for the engine's loop (inbox), for the link's thread (outbox), for frontends that do not read "
            "(backlog).",
            "none",
            ((f"sum by (queue) (tandem_engine_link_queue_messages{{{ENGINE}}})", "{{queue}}"),),
        ),
        Panel(
            "Frontends of an engine",
            "Frontend processes connected to each engine: equal for all where every frontend reaches every engine.",
            "none",
            ((f"max by (pod) (tandem_engine_frontends{{{ENGINE}}})", "{{pod}}"),),
        ),
    ),
    "Frontends": (
        Panel(
            "Event loop's lag, p99",
            "How long everything else in a frontend waits for what runs. Add frontends, or find what blocks.",
            "s",
            ((quantile(0.99, "tandem_frontend_event_loop_lag_seconds", POD, "pod"), "{{pod}}"),),
        ),
        Panel(
            "In flight",
            "Requests being answered, and those of them that stream.",
            "none",
            (
                (f"sum by (pod) (tandem_frontend_requests_in_flight{{{POD}}})", "{{pod}} requests"),
                (f"sum by (pod) (tandem_frontend_streams_in_flight{{{POD}}})", "{{pod}} streams"),
            ),
        ),
        Panel(
            "Processor",
            "Cores that each frontend uses, one at most. Not shown where several processes share a port.",
            "none",
            (
                (
                    f"sum by (pod) ({rate('process_cpu_seconds_total', FRONTEND)})",
                    "{{pod}}",
                ),
            ),
        ),
        Panel(
            "Templates and tokens",
            "p95 of rendering a chat template, of tokenizing a request's prompts, of turning an engine's message "
            "into text.",
            "s",
            (
                (quantile(0.95, "tandem_frontend_template_seconds", MODEL, "model"), "{{model}} template"),
                (quantile(0.95, "tandem_frontend_tokenize_seconds", MODEL, "model"), "{{model}} tokenize"),
                (quantile(0.95, "tandem_frontend_detokenize_seconds", MODEL, "model"), "{{model}} detokenize"),
            ),
        ),
        Panel(
            "Engines as frontends see them",
            "By state: refused engines serve other weights, or another vocabulary, than the rest.",
            "none",
            ((f"max by (model, state) (tandem_frontend_engines{{{MODEL}}})", "{{model}} {{state}}"),),
        ),
        Panel(
            "Waiting for an engine",
            "Choices that no engine has, because theirs was lost and none takes them.",
            "none",
            ((f"sum by (model) (tandem_frontend_generations_without_engine{{{MODEL}}})", "{{model}}"),),
        ),
    ),
}
