"""The actor's side of a vLLM engine: one replica, tensor-parallel inside."""

import dataclasses
import json
import multiprocessing.connection
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.backends.shards.layout import Tensor
from megarl.settings import EngineConfig, SamplingConfig, did_you_mean
from megarl.types import Stop

# Engine arguments that megarl's own configuration decides; a `vllm:` override of one would contradict it.
OWNED_ARGS = {
    "model": "agents.<name>.model",
    "dtype": "agents.<name>.dtype",
    "tensor_parallel_size": "agents.<name>.engine.tp",
    "max_num_seqs": "agents.<name>.engine.max_sequences",
    "gpu_memory_utilization": "agents.<name>.engine.memory_share",
    "kv_cache_memory_bytes": "agents.<name>.engine.kv_cache_gib",
    "max_model_len": "the prompt limit and sampling.max_tokens",
    "seed": "seed",
    "generation_config": "sampling",
    "override_generation_config": "sampling",
    "logprobs_mode": "nothing: logprobs are those of the sampling distribution",
    "load_format": "nothing: weights come from the policy",
    "worker_extension_cls": "nothing: it loads weights",
    "distributed_executor_backend": "nothing: a replica is one actor",
    "skip_tokenizer_init": "nothing: token ids go in and out",
    "enable_sleep_mode": "nothing: it follows the device",
}
# vLLM's FINISH_REASON_STRINGS: "error" is an internal one of a single request, "repetition" that of a detector
STOPS: dict[str, Stop] = {
    "stop": "end",
    "length": "length",
    "abort": "abort",
    "error": "abort",
    "repetition": "abort",
}


RANK_GONE_S = 1.0  # a survivor notices the broken connection before the death is known


@dataclass(frozen=True, slots=True)
class Request:
    """One rollout to draw."""

    prompt_ids: np.ndarray  # int32[Lp]
    seed: int


@dataclass(frozen=True, slots=True)
class Response:
    """What was drawn, the end token included."""

    token_ids: np.ndarray  # int32[Lc]
    logprobs: np.ndarray  # float32[Lc]
    stop: Stop


class VllmWorker:
    """One vLLM engine. It starts with dummy weights: nothing may be sampled before a refit, so none are read twice."""

    def __init__(
        self,
        *,
        model: str,
        dtype: str,
        device: str,
        config: EngineConfig,
        max_model_len: int,
        stop_ids: tuple[int, ...],
        overrides: Mapping[str, Any],
    ) -> None:
        from vllm import LLM  # here, since the driver imports this file: vllm takes seconds and sets up a platform

        self._stop_ids = list(stop_ids)
        self._expected = checkpoint_names(model)
        self._received: set[str] | None = None  # names that came in the refit under way; None: none under way
        self._freed: set[str] = set()  # what sleep gave back: "weights", "kv_cache"
        self._can_sleep = device == "cuda"  # on CPU vLLM's sleep does nothing
        self._llm = LLM(
            **engine_args(
                model=model,
                dtype=dtype,
                device=device,
                config=config,
                max_model_len=max_model_len,
                overrides=overrides,
            )
        )

        self._ranks = [each.proc for each in self._llm.llm_engine.model_executor.workers] if config.tp > 1 else []

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Response]:
        """One response per request, in order; every request draws from its own seed."""
        from vllm import SamplingParams, TokensPrompt

        if not requests:
            return []
        params = [
            SamplingParams(
                n=1,
                seed=request.seed,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                logprobs=0,  # the sampled token's alone
                ignore_eos=True,  # the stop ids are all there is: nothing is taken from the model's own files
                stop_token_ids=self._stop_ids,
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [TokensPrompt(prompt_token_ids=request.prompt_ids.tolist()) for request in requests]
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        except Exception:  # whatever the survivors call it
            self._end_with_its_ranks()
            raise
        return [_response(output.outputs[0]) for output in outputs]

    def score(self, prompt_ids: np.ndarray, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """float32[Lc]: logprobs of given tokens after a prompt, one request each, as sampling them would give; cached
        prefixes serve them."""
        from vllm import SamplingParams, TokensPrompt

        whole = [*prompt_ids.tolist(), *token_ids.tolist()]
        starts = range(len(prompt_ids), len(whole))
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=1,
                seed=0,
                logprob_token_ids=[whole[at]],
                ignore_eos=True,
                detokenize=False,
            )
            for at in starts
        ]
        prompts = [TokensPrompt(prompt_token_ids=whole[:at]) for at in starts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        tables = [table for output in outputs for table in output.outputs[0].logprobs or ()]
        return sampled_logprobs(token_ids.tolist(), tables)

    def _end_with_its_ranks(self) -> None:
        """Without one of its ranks an engine can do nothing, and must not look as if it had made a mistake."""
        if multiprocessing.connection.wait([rank.sentinel for rank in self._ranks], timeout=RANK_GONE_S):
            print("a rank of this engine died: it ends", flush=True)
            os._exit(1)

    def begin_refit(self) -> None:
        self._take_back("weights")
        if self._received is not None:  # the last refit was given up half-way
            self._llm.collective_rpc("megarl_finish_reload")
        self._received = set()
        self._llm.collective_rpc("megarl_begin_reload")

    def load_weights(self, path: Path, names: Sequence[str]) -> None:
        """Take one bucket. Raises ValueError for a tensor that the model does not have, or that came before."""
        assert self._received is not None, "load_weights outside begin_refit and finish_refit"
        unknown = sorted(set(names) - self._expected)
        if unknown:
            raise ValueError(f"{path}: the engine's model has no weight {_some(unknown)}")
        again = sorted(self._received.intersection(names))
        if again:
            raise ValueError(f"{path}: weight {_some(again)} came twice in one refit")
        self._llm.collective_rpc("megarl_load_file", args=(str(path), list(names)))
        self._received.update(names)

    def finish_refit(self) -> None:
        """Put the model together again and drop cached prefixes. Raises ValueError where a weight never came."""
        assert self._received is not None, "finish_refit without begin_refit"
        missing = sorted(self._expected - self._received)
        self._received = None
        self._llm.collective_rpc("megarl_finish_reload")
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(self._expected)} weights never came in the refit: {_some(missing)}"
            )
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are still running")

    def record(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Per rank: shards, shapes of parameters, tensors that cannot be recorded (see vllm.record)."""
        return self._llm.collective_rpc("megarl_record", args=(list(tensors),))

    def begin_boxes(
        self, shapes: Sequence[Mapping[str, tuple[int, ...]]], wanted: Sequence[Mapping[str, int]], verify: bool
    ) -> None:
        """A planned refit; one that was given up half-way, of either kind, is forgotten."""
        self._take_back("weights")
        if self._received is not None:
            self._received = None
            self._llm.collective_rpc("megarl_finish_reload")
        self._llm.collective_rpc("megarl_begin_boxes", args=(shapes, wanted, verify))

    def take(self, files: Sequence[Any]) -> None:
        """Per rank its buckets of one round."""
        self._llm.collective_rpc("megarl_take", args=(files,))

    def finish_boxes(self) -> None:
        """Drop cached prefixes. Raises ValueError where not all of a parameter has come."""
        for rank, names in enumerate(self._llm.collective_rpc("megarl_finish_boxes")):
            if names:
                raise ValueError(
                    f"{len(names)} parameters of engine rank {rank} were not written whole in the refit: {_some(names)}"
                )
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are still running")

    def begin_judging(self) -> None:
        self._llm.collective_rpc("megarl_begin_judging")

    def judge(self, path: Path, names: Sequence[str]) -> None:
        """One bucket of the policy's export."""
        self._llm.collective_rpc("megarl_judge", args=(str(path), list(names)))

    def verdict(self) -> list[list[str]]:
        """Per rank: what it does not hold of the export."""
        return self._llm.collective_rpc("megarl_verdict")

    def sleep(self) -> None:
        """Free the GPU; weights are dropped, not kept in host memory, since a refit follows."""
        if self._can_sleep and "weights" not in self._freed:
            self._take_back("kv_cache")  # a refit may have woken the weights alone; vLLM sleeps as a whole
            self._llm.sleep(level=2)
            self._freed = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take back the memory of the KV cache; that of the weights came with the refit."""
        self._take_back("kv_cache")

    def _take_back(self, part: str) -> None:
        if part in self._freed:
            self._llm.wake_up(tags=[part])
            self._freed.discard(part)

    def close(self) -> None:
        """End vLLM's own processes; the actor itself is ended by its group."""
        self._llm.llm_engine.engine_core.shutdown()


def engine_args(
    *, model: str, dtype: str, device: str, config: EngineConfig, max_model_len: int, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of vllm.LLM: ours, then the user's native ones (``vllm:``)."""
    check_overrides(overrides)
    args: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "tensor_parallel_size": config.tp,
        # inside a Ray actor vLLM would start Ray workers of its own
        "distributed_executor_backend": "mp" if config.tp > 1 else "uni",
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_sequences,
        "load_format": "dummy",
        "seed": 0,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "worker_extension_cls": "megarl.backends.vllm.loading.WeightLoading",
    }
    if device == "cpu":
        args["enforce_eager"] = True
        args["block_size"] = 32  # the default of 128 gives short prompts no prefix-cache hits
        args["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        # a prompt cut into chunks makes vLLM wind the request's own generator back, which torch's on CPU cannot
        args["enable_chunked_prefill"] = False
        args["max_num_batched_tokens"] = max(max_model_len, 8192)
    else:
        args["enable_sleep_mode"] = True
        args["gpu_memory_utilization"] = config.memory_share
    return args | dict(overrides)


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError for a key of ``vllm:`` that is no engine argument of this vLLM, or that megarl sets itself."""
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for key in overrides:
        if key in OWNED_ARGS:
            raise ValueError(f"vllm.{key} is set by {OWNED_ARGS[key]}")
        if key not in known:
            hint = did_you_mean(key, known, "vllm.")
            raise ValueError(f"vllm.{key}: vLLM has no such engine argument{hint}")


def checkpoint_names(model: str) -> frozenset[str]:
    """Names of the weights of a Hugging Face model as its safetensors files list them, without the tied head."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json"]))
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            names |= set(json.loads(stream.read(length)))
    if not names:
        raise ValueError(f"{model}: no safetensors files there (pickled weights are not read)")
    names.discard("__metadata__")
    config = json.loads((folder / "config.json").read_text())
    if config.get("tie_word_embeddings", False):
        names.discard("lm_head.weight")
    # a buffer that old Llama exports carry and that no release loads
    return frozenset(name for name in names if not name.endswith("rotary_emb.inv_freq"))


def sampled_logprobs(token_ids: Sequence[int], tables: Sequence[Mapping[int, Any]]) -> np.ndarray:
    """float32[Lc]: every position's logprob of its own token, wherever in the table it stands."""
    return np.array([table[token].logprob for token, table in zip(token_ids, tables, strict=True)], dtype=np.float32)


def process_env(device: str) -> dict[str, str]:
    """Environment that must stand before vllm is imported."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the actor is the process: no second one around the engine core
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
    }
    if device == "cpu":
        env["TORCHDYNAMO_DISABLE"] = "1"  # eager all through: the sampler's one compiled line costs more than it saves
    if "HF_HUB_OFFLINE" in os.environ:
        env["HF_HUB_OFFLINE"] = os.environ["HF_HUB_OFFLINE"]
    return env


def _response(output: Any) -> Response:
    return Response(
        token_ids=np.asarray(output.token_ids, dtype=np.int32),
        logprobs=sampled_logprobs(output.token_ids, output.logprobs or ()),  # None where nothing was sampled
        stop=STOPS[output.finish_reason],
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
