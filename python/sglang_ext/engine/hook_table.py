"""Every place where this project changes SGLang: what, how, why and where.

The table is data. `entry_point.register` puts the hooks that apply into SGLang's hook registry, and
`verification.verify_hooks` checks afterwards, in each process, that they are really in force.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sglang_ext.engine.device import Device
from sglang_ext.engine.options import ExtensionOptions


class HookKind(StrEnum):
    """Values are those of SGLang's HookType, where the meaning of each is described."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


@dataclass(frozen=True)
class Hook:
    """One change to SGLang."""

    name: str
    why: str
    kind: HookKind
    implementation: str  # module:attribute, imported when the hook is registered
    target: str  # dotted path, the same in every supported SGLang
    needs_laps: bool = False  # registered only where LAPS schedules prefills
    needs_graphs: bool = False  # registered only where prefill graphs are wanted
    needs_streams: bool = False  # registered only where KV leaves for decode by layer
    needs_stages: bool = False  # registered only where the instance is a pipeline
    needs_ranks: bool = False  # registered only where the instance has several data-parallel ranks
    needs_handshake: bool = False  # registered only where the handshake transfers KV
    is_for_pools: bool | None = None  # registered only where the instance is a member of a long pool, or is not
    device: Device | None = None  # registered only in engines on this device

    def is_wanted(self, options: ExtensionOptions) -> bool:
        """Return whether an engine with these options has this hook."""
        is_member = options.cdsp is not None
        has_needs = (options.laps is not None or not self.needs_laps) and (
            options.graphs is not None or not self.needs_graphs
        )
        has_needs &= options.streams_layers or not self.needs_streams
        has_needs &= options.transfer is not None or not self.needs_handshake
        has_needs &= options.stages > 1 or not self.needs_stages
        has_needs &= options.data_parallel_ranks > 1 or not self.needs_ranks
        return has_needs and self.is_for_pools in {None, is_member} and self.device in {None, options.device}


_HOOKS = "sglang_ext.engine.hooks"

HOOK_TABLE: tuple[Hook, ...] = (
    Hook(
        name="transfer-backend-names",
        why="the enumeration of KV transfer backends is closed; adds the TCP and the handshake backend",
        kind=HookKind.REPLACE,
        implementation="sglang_ext.transfer.sglang.transfer_backends:ExtendedTransferBackend",
        target="sglang.srt.disaggregation.utils.TransferBackend",
    ),
    Hook(
        name="transfer-backend-classes",
        why="maps these backends to their classes, and keeps CUDA events and pinned memory out of a CPU engine",
        kind=HookKind.AROUND,
        implementation="sglang_ext.transfer.sglang.transfer_backends:get_kv_class",
        target="sglang.srt.disaggregation.utils.get_kv_class",
    ),
    Hook(
        name="layer-streams",
        why="KV of a chunk is sent once all of it is computed; lets the layers of a long one leave before",
        kind=HookKind.AROUND,
        implementation="sglang_ext.transfer.sglang.layer_streams:run_batch",
        target="sglang.srt.managers.scheduler.Scheduler.run_batch",
        needs_streams=True,
    ),
    Hook(
        name="parallel-samples",
        why="n > 1 sends a warm-up request and then every sample with one and the same room; spreads rooms",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.bootstrap_rooms:normalize_batch_and_arguments",
        target="sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
    ),
    Hook(
        name="abort-family",
        why="a batch or a request with n > 1 cannot be aborted by its id; aborts every member",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.aborts:abort_request",
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request",
    ),
    Hook(
        name="request-guard",
        why="two requests with one room hang, or get each other's KV, and more alternatives than prefill can send to "
        "decode end the engine; refuses these requests",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.bootstrap_rooms:add_request_to_queue",
        target="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
    ),
    Hook(
        name="token-id-guard",
        why="a token id beyond the vocabulary, in the prompt or a stop, ends the engine; refuses the request",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.bootstrap_rooms:validate_one_request",
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    ),
    Hook(
        name="hint-guard",
        why="an invalid deadline or priority reaches the scheduler unchecked; refuses the request",
        kind=HookKind.AROUND,
        implementation="sglang_ext.laps.sglang.request_hints:handle_request",
        target="sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
    ),
    Hook(
        name="hint-guard-generate",
        why="the same for /generate, before a stream has begun; without it a stream begins, and ends with the error",
        kind=HookKind.AROUND,
        implementation="sglang_ext.laps.sglang.request_hints:generate_contract_error",
        target="sglang.srt.entrypoints.api_contract.generate_contract_error",
    ),
    Hook(
        name="shutdown",
        why="a request that comes while an instance ends may wait for a scheduler that is gone, and hold up the end",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.shutdown:end_when_idle",
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog",
    ),
    Hook(
        name="statement",
        why="each scheduler process verifies its own hooks, and /server_info states version, role and hooks",
        kind=HookKind.AFTER,
        implementation="sglang_ext.engine.verification:add_statement",
        target="sglang.srt.managers.scheduler.Scheduler.get_init_info",
    ),
    Hook(
        name="statements-of-ranks",
        why="the controller of data-parallel ranks does not pass on what their schedulers state",
        kind=HookKind.AFTER,
        implementation="sglang_ext.engine.verification:pass_statements",
        target="sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        needs_ranks=True,
    ),
    Hook(
        name="statement-check",
        why="the main process refuses to serve when a scheduler runs without the hooks",
        kind=HookKind.AFTER,
        implementation="sglang_ext.engine.verification:check_statements",
        target="sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
    ),
    Hook(
        name="memory-pools",
        why="SGLang reports tokens of one memory pool; /server_info has the slots of all, windows and states too",
        kind=HookKind.AFTER,
        implementation="sglang_ext.engine.hooks.memory_pools:add_memory",
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    ),
    Hook(
        name="load-reports",
        why="load is published with KV events only, and without what decode waits for and the queues; publishes more",
        kind=HookKind.AFTER,
        implementation=f"{_HOOKS}.load_reports:publish",
        target="sglang.srt.managers.scheduler.Scheduler.init_load_publisher",
    ),
    Hook(
        name="prefill-abort-notice",
        why="a prefill that is aborted before its transfer leaves decode waiting for 300 s; notifies decode",
        kind=HookKind.AFTER,
        implementation=f"{_HOOKS}.aborts:notify_decode",
        target="sglang.srt.disaggregation.common.conn.CommonKVSender.abort",
    ),
    Hook(
        name="prefill-abort-late-notice",
        why="decode that registers after the abort opens the room again and waits for 300 s; notifies it, too",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.aborts:notify_late_decode",
        target="sglang.srt.disaggregation.common.conn.CommonKVManager.update_status",
    ),
    Hook(
        name="prefill-restarts",
        why="decode keeps sending to the old ports of a prefill instance that was restarted or switched; forgets them",
        kind=HookKind.AFTER,
        implementation="sglang_ext.transfer.sglang.prefill_restarts:drop_restarted",
        target="sglang.srt.disaggregation.common.conn.CommonKVManager._on_heartbeat_success",
    ),
    Hook(
        name="cleared-rooms",
        why="a transfer thread asks for the status of a room that was just cleared, and ends; the room has failed",
        kind=HookKind.AROUND,
        implementation="sglang_ext.transfer.sglang.transfer_backends:room_status",
        target="sglang.srt.disaggregation.common.conn.CommonKVManager.check_status",
    ),
    Hook(
        name="room-updates",
        why="two threads that set a room's status lose one of the two, and prefill waits for decode; one at a time",
        kind=HookKind.AROUND,
        implementation="sglang_ext.transfer.sglang.transfer_backends:update_room",
        target="sglang.srt.disaggregation.common.conn.CommonKVManager.update_status",
    ),
    Hook(
        name="scoring-metadata",
        why="metadata for decode may not fit its buffer; left out for a request without a decode instance",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.scoring:set_metadata",
        target="sglang.srt.disaggregation.utils.MetadataBuffers.set_buf",
    ),
    Hook(
        name="scoring-finish",
        why="prefill ends every request for its length; one without decode ends for the reason of a plain server",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.scoring:stream_output",
        target="sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
    ),
    Hook(
        name="continued-output",
        why="a request that goes on here after its instance was lost brings its tokens; makes them output again",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.continuations:commit_transfer",
        target="sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
    ),
    Hook(
        name="marked-tokens-chat",
        why="a streamed chat says nothing of its token ids, without which it cannot go on elsewhere; adds them",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.continuations:mark_tokens",
        target="sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
    ),
    Hook(
        name="marked-tokens-completion",
        why="the same for a streamed completion, whose `return_token_ids` every client would see",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.continuations:mark_tokens",
        target="sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._generate_completion_stream",
    ),
    Hook(
        name="idle-wait",
        why="a CPU engine whose requests wait for KV keeps a core busy with polling; sleeps a millisecond",
        kind=HookKind.AFTER,
        implementation="sglang_ext.transfer.sglang.transfer_backends:wait_a_little",
        target="sglang.srt.managers.scheduler.Scheduler.on_idle",
    ),
    Hook(
        name="shared-tokenizer",
        why="an engine loads its tokenizer four times, a second each; its processes share what the first has loaded",
        kind=HookKind.AROUND,
        implementation="sglang_ext.engine.hooks.shared_tokenizer:get_tokenizer",
        target="sglang.srt.utils.hf_transformers_utils.get_tokenizer",
        device=Device.CPU,
    ),
    Hook(
        name="prefix-attention",
        why="SGLang's attention for CPUs computes a chunk as if its whole prefix were new; only the new tokens",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.prefix_attention:run_extend",
        target="sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
        device=Device.CPU,
    ),
    Hook(
        name="layer-attention-extend",
        why="SGLang's attention for CPUs has no caps, sinks and windows over a pool of their own; has them",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.layer_attention:run_layer",
        target="sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        device=Device.CPU,
    ),
    Hook(
        name="layer-attention-decode",
        why="the same for the tokens of replies",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.layer_attention:run_layer",
        target="sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode",
        device=Device.CPU,
    ),
    Hook(
        name="draft-attention",
        why="SGLang's draft models have attention for CPUs only as AMX kernels; have it as other models do",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.draft_attention:create_backend",
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        device=Device.CPU,
    ),
    Hook(
        name="draft-head",
        why="a draft model that gets its target's head waits for a GPU, also on a CPU; does not wait there",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.draft_attention:share_head",
        target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head",
        device=Device.CPU,
    ),
    Hook(
        name="drawn-tokens",
        why="on a CPU SGLang verifies drafts greedily at any temperature; draws what a request asks for",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.draft_attention:verify_drafts",
        target="sglang.srt.speculative.eagle_worker_common.eagle_sample",
        device=Device.CPU,
    ),
    Hook(
        name="batch-padding",
        why="SGLang's attention for CPUs cannot pad the batches of ranks with --enable-dp-attention; lets it",
        kind=HookKind.AFTER,
        implementation="sglang_ext.cpu.layer_attention:add_padding",
        target="sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.__init__",
        needs_ranks=True,
        device=Device.CPU,
    ),
    Hook(
        name="fp8-kv",
        why="SGLang has KV in FP8 on a CPU for AMX kernels only; keeps it as on other devices",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.fp8_kv:configure",
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
        device=Device.CPU,
    ),
    Hook(
        name="host-cache",
        why="the host tier of a hierarchical cache is pinned and copied by CUDA; keeps it in ordinary memory",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.host_cache:allocate",
        target="sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__",
        device=Device.CPU,
    ),
    Hook(
        name="latent-attention",
        why="attention for CPUs asks for keys and values of heads where a DeepSeek keeps latent rows; reads the rows",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.latent_attention:choose_method",
        target="sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method",
        device=Device.CPU,
    ),
    Hook(
        name="latent-rotary",
        why="SGLang makes the rotary embedding of latent attention on a CPU only for YaRN; makes the others",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.latent_attention:make_rotary",
        target="sglang.srt.layers.rotary_embedding.factory.get_rope_cpu",
        device=Device.CPU,
    ),
    Hook(
        name="expert-ranks",
        why="SGLang's experts for CPUs take the number of an expert on another rank for an index; leaves it out",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.expert_ranks:skip_experts_of_others",
        target="sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        device=Device.CPU,
    ),
    Hook(
        name="recurrent-kernels",
        why="layers with a recurrent state have kernels for GPUs only; computes them in torch",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.recurrent_kernels:bind",
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        device=Device.CPU,
    ),
    Hook(
        name="replicated-groups",
        why="SGLang's loader for CPUs pads a group of Mamba 2 that each rank has a copy of, and fails; copies it",
        kind=HookKind.AROUND,
        implementation="sglang_ext.cpu.replicated_groups:load_replicated",
        target="sglang.srt.layers.attention.mamba.mamba.mamba_v2_sharded_weight_loader",
        device=Device.CPU,
    ),
    Hook(
        name="admitted-attention",
        why="SGLang refuses gpt-oss on its attention for CPUs, which has neither its windows nor sinks; admits it",
        kind=HookKind.AROUND,
        implementation="sglang_ext.engine.hooks.served_models:admit_attention",
        target="sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        device=Device.CPU,
    ),
    Hook(
        name="served-windows",
        why="SGLang serves some models without their sliding windows, and says nothing; refuses them",
        kind=HookKind.AFTER,
        implementation="sglang_ext.engine.hooks.served_models:check_windows",
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    ),
    Hook(
        name="tied-head",
        why="the last stage of a Llama with tied embeddings has no embeddings, and so no head; builds the head",
        kind=HookKind.AROUND,
        implementation="sglang_ext.laps.sglang.pipeline_stages:init_model",
        target="sglang.srt.models.llama.LlamaForCausalLM.__init__",
        needs_stages=True,
    ),
    Hook(
        name="tied-head-weights",
        why="the weights of that head are those of the embeddings; loads them",
        kind=HookKind.AROUND,
        implementation="sglang_ext.laps.sglang.pipeline_stages:load_weights",
        target="sglang.srt.models.llama.LlamaForCausalLM.load_weights",
        needs_stages=True,
    ),
    Hook(
        name="stage-layers",
        why="a stage whose number of layers does not divide the model's writes values to wrong layers of decode",
        kind=HookKind.AROUND,
        implementation="sglang_ext.laps.sglang.pipeline_stages:layer_pointers",
        target="sglang.srt.disaggregation.common.conn.CommonKVManager.get_mha_kv_ptrs_with_pp",
        needs_stages=True,
    ),
    Hook(
        name="slots-announced",
        why="decode takes slots for a prompt when it arrives; a long one gets them when its turn in prefill is near",
        kind=HookKind.AROUND,
        implementation="sglang_ext.transfer.sglang.late_slots:announce",
        target="sglang.srt.disaggregation.decode.DecodePreallocQueue._init_receiver",
        needs_handshake=True,
    ),
    Hook(
        name="slots-called",
        why="a prefill instance names in each round the long prompts for which decode should take slots now",
        kind=HookKind.AROUND,
        implementation="sglang_ext.transfer.sglang.late_slots:call_for_slots",
        target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped",
        needs_handshake=True,
    ),
    Hook(
        name="laps-scheduler",
        why="one queue lets short prompts wait behind long ones; two queues, and long prefills that yield",
        kind=HookKind.REPLACE,
        implementation="sglang_ext.laps.sglang.scheduler:LengthAwareScheduler",
        target="sglang.srt.managers.scheduler.Scheduler",
        needs_laps=True,
        is_for_pools=False,
    ),
    Hook(
        name="cdsp-scheduler",
        why="a long prompt keeps one instance busy while others idle; as laps-scheduler, with chunks on several",
        kind=HookKind.REPLACE,
        implementation="sglang_ext.long_pool.sglang.scheduler:SequenceParallelScheduler",
        target="sglang.srt.managers.scheduler.Scheduler",
        needs_laps=True,
        is_for_pools=True,
    ),
    Hook(
        name="cdsp-release",
        why="a prefill whose KV other instances have sent to decode has none of its own; SGLang takes that for a fault",
        kind=HookKind.AROUND,
        implementation="sglang_ext.long_pool.sglang.ending:release_kv_cache",
        target="sglang.srt.disaggregation.prefill.release_kv_cache",
        needs_laps=True,
        is_for_pools=True,
    ),
    Hook(
        name="prefill-graphs",
        why="upstream captures prefill graphs by tokens; captures those of short prefills by length and batch size",
        kind=HookKind.AROUND,
        implementation="sglang_ext.graphs.sglang.capture:capture_prefill_graph",
        target="sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
        needs_graphs=True,
    ),
)
