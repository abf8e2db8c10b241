"""The engine's settings: environment variables TANDEM_…, the same names as flags, printed by --help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.settings import ModelSettings, ServiceSettings


class EngineSettings(ModelSettings, ServiceSettings):
    """What one engine process runs."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"] = Field(
        "auto", description="The weights' and the KV cache's type; auto takes the checkpoint's."
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="Bits of the weights, rounded at loading: faster and smaller on a CPU in bfloat16, and less exact.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto takes a GPU if there is one."
    )
    executor: Literal["torch", "simulated"] = Field("torch", description="Run the model, or simulate its timing.")
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Prompt and output tokens of one request at most; the model's own limit by default.",
    )
    max_num_seqs: int = Field(64, ge=1, description="Requests in one step at most.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens in one step at most (the scheduler's budget); by default 2048, on a CPU 256, or twice "
        "max_num_seqs where that is more; on a CPU twice as many while much waits.",
    )
    max_waiting_requests: int = Field(
        1024, ge=1, description="Requests that may wait; beyond it the engine refuses (429)."
    )
    block_size: int = Field(16, ge=1, description="Tokens in one KV-cache block.")
    num_kv_blocks: int | None = Field(
        None, ge=1, description="KV-cache blocks; by default as many as kv_cache_memory holds."
    )
    kv_cache_memory: float = Field(
        2.0,
        gt=0,
        description="GiB for the KV cache on a CPU, taken as the engine first idles, where there is enough.",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory for weights, activations and KV cache."
    )
    enable_prefix_caching: bool = Field(True, description="Share full KV blocks between requests with equal prefixes.")
    logprobs_mode: Literal["raw", "processed"] = Field(
        "raw", description="Logprobs before or after temperature, penalties and masks."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the model; all cores by default.")
    link_host: str = Field("127.0.0.1", description="Address that the link's ROUTER binds.")
    link_port: int = Field(5555, ge=0, le=65535, description="Port that the link's ROUTER binds; 0 takes a free one.")
    probe_host: str = Field("127.0.0.1", description="Address of the probes and metrics.")
    probe_port: int = Field(8001, ge=0, le=65535, description="Port of the probes and metrics; 0 takes a free one.")
    heartbeat_interval: float = Field(1.0, gt=0, description="Seconds between heartbeats on an idle link.")
    heartbeat_timeout: float = Field(
        5.0,
        gt=0,
        description="Seconds of silence after which a frontend is gone and its requests are aborted.",
    )
    shutdown_grace: float = Field(25.0, ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    simulated_tokens: Literal["random", "echo"] = Field("random", description="Tokens of the simulated executor.")
    simulated_accelerator: Literal["instant", "h100", "h200"] = Field(
        "instant", description="Timing preset of the simulated executor."
    )
    simulated_step_ms: float | None = Field(
        None, ge=0, description="Milliseconds of every simulated step, instead of the preset's timing."
    )
    ready_file: Path | None = Field(
        None, description="A file that is written, with the bound ports as JSON, once the engine serves."
    )
    step_timeout: float = Field(
        120.0,
        gt=0,
        description="Seconds after which an unfinished step counts as hung: liveness fails, heartbeats stop.",
    )

    def step_budget(self, device: str) -> "StepBudget":
        """Where it is left open, every running request has its token in every step, and a prompt's next piece as much
        room again. A CPU computes small steps almost as fast as large ones."""
        if self.max_num_batched_tokens is not None:
            return StepBudget(self.max_num_batched_tokens, self.max_num_batched_tokens)
        if device == "cpu":
            usual = max(256, 2 * self.max_num_seqs)
            return StepBudget(usual, 2 * usual)
        most = max(2048, 2 * self.max_num_seqs)
        return StepBudget(most, most)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Tokens in one step: where little waits, and at most."""

    usual: int
    most: int
