"""vLLM's scheduler with a short way for the steps in which every request decodes one token.

Such steps are nearly all of a rollout. vLLM's general loops (chunked prefill, speculation, encoders,
connectors, grammars) cost them 50 microseconds a request, which is more than a small model's own
work. `megarl.rollout.vllm_engine` builds the engine with it; its requests have no grammar, minimum
length or repetition rule, and `_build` asks for no pipeline, LoRA, connector or statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutputs, FinishReason

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput


class Decoded(NamedTuple):
    """One token of a request; stands where vLLM has an EngineCoreOutput."""

    request_id: str
    token: int
    logprob: float
    finish_reason: FinishReason | None


class DecodeScheduler(Scheduler):
    """Decides as `Scheduler` does, and falls back on it wherever a step is not plain decoding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Several groups of layers have blocks of several sizes, or states instead of blocks.
        one_kind = len(self.kv_cache_config.kv_cache_groups) == 1 and not self.has_mamba_layers
        self._can_decode = one_kind and not self.num_spec_tokens
        self._decoding: SchedulerOutput | None = None

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        blocks = self._decode_blocks()
        if blocks is None:
            self._decoding = None
            return super().schedule(throttle_prefills)
        self._decoding = self._decode(blocks)
        return self._decoding

    def _decode_blocks(self) -> list[int] | None:
        """Return places in `running` of requests that begin or fill a block; None: no decoding."""
        running = self.running
        room = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        is_full = len(running) == self.max_num_running_reqs  # then nobody who waits is let in
        if (
            not self._can_decode
            or not 0 < len(running) <= room
            or ((self.waiting or self.kv_holding_waiting) and not is_full)
            or self._pause_state != PauseState.UNPAUSED
        ):
            return None
        places = []
        for place, request in enumerate(running):
            computed = request.num_computed_tokens
            if request.is_prefill_chunk or request.num_tokens != computed + 1:
                return None
            if (computed + 1) % self.block_size < 2:
                places.append(place)
        if len(places) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None  # somebody has to be preempted
        return places

    def _decode(self, places: list[int]) -> SchedulerOutput:
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        running = self.running
        names = [request.request_id for request in running]
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(running)
        for place in places:
            blocks = self.kv_cache_manager.allocate_slots(running[place], 1)
            assert blocks is not None, "there are as many free blocks as requests"
            new_blocks[place] = blocks.get_block_ids(allow_none=True)
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_blocks,
                num_computed_tokens=[request.num_computed_tokens for request in running],
                num_output_tokens=[request.num_output_tokens for request in running],
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        for request in running:
            request.num_computed_tokens += 1
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output is not self._decoding:
            return super().update_from_output(scheduler_output, model_runner_output)
        self._decoding = None
        places = model_runner_output.req_id_to_index
        tokens = model_runner_output.sampled_token_ids
        assert model_runner_output.logprobs is not None, "each request asks for them"
        logprobs = model_runner_output.logprobs.logprobs[:, 0].tolist()
        outputs: list[Any] = []
        ended = set()
        for request in self.running:
            place = places[request.request_id]
            (token,) = tokens[place]
            params = request.sampling_params
            assert params is not None
            assert params.stop_token_ids is not None
            request.append_output_token_ids(token)
            reason = None
            if (
                token in params.stop_token_ids
                or request.num_output_tokens >= request.max_tokens
                or request.num_tokens >= self.max_model_len
            ) and check_stop(request, self.max_model_len):
                reason = request.get_finished_reason()
                self._free_request(request)
                ended.add(request)
            outputs.append(Decoded(request.request_id, token, logprobs[place], reason))
        self.running = remove_all(self.running, ended)
        return {0: EngineCoreOutputs(outputs=outputs)}
