"""What vLLM says about FP8 checkpoints, and what it means. Texts of 0.32 and 0.33."""

from octavo.workflows.rules.errors import AGAIN, BY_CHANNEL, FIX_COPY, VERIFY, KnownError

IN_VLLM = VERIFY.format("vllm")

VLLM_ERRORS = (
    KnownError(
        "vllm-online-fp8", "vLLM", r"no longer supports online\s+quantization",
        "The `fp8` quantization method no longer supports online quantization. Please use `--quantization "
        "fp8_per_tensor`",
        "--quantization fp8 only loads checkpoints that are FP8 already.",
        "`vllm serve MODEL --quantization fp8_per_tensor`, or quantize first: `octavo quantize MODEL OUT`, "
        "then serve OUT.",
    ),
    KnownError(
        "vllm-partial-fusion", "vLLM", r"some but not all shards of .* are quantized",
        "Detected some but not all shards of model.layers.0.self_attn.qkv_proj are quantized.",
        "q, k and v (or gate and up) are merged into one matrix, and the skip list names only some of them.",
        f"List all shards or none, by full names. {AGAIN}",
    ),
    KnownError(
        "vllm-mixed-schemes", "vLLM", r"different quantization schemes for the shards of",
        "Found different quantization schemes for the shards of model.layers.0.self_attn.qkv_proj. vLLM requires all",
        "Targets or ignore of the compressed-tensors config treat shards of one merged matrix differently.",
        f"Give all shards the same group. {AGAIN}",
    ),
    KnownError(
        "vllm-k-not-block", "vLLM", r"input_size_per_partition = \d+ is not divisible by weight quantization block_k",
        "Weight input_size_per_partition = 192 is not divisible by weight quantization block_k = 128.",
        "Split over tensor-parallel ranks, the input dimension is no whole number of blocks.",
        f"Use a smaller --tensor-parallel-size (`octavo verify DIR` prints the largest). {BY_CHANNEL}",
    ),
    KnownError(
        "vllm-n-not-block", "vLLM", r"output_partition_size = \d+ is not divisible by weight quantization block_n",
        "Weight output_partition_size = 64 is not divisible by weight quantization block_n = 128.",
        "A shard of a merged or split matrix has rows that are no whole number of blocks; often k and v.",
        f"Use a smaller --tensor-parallel-size. {BY_CHANNEL}",
    ),
    KnownError(
        "vllm-moe-gate-block", "vLLM", r"output_size of gate's and up's weight = \d+ is not divisible",
        "The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128.",
        "The experts' intermediate size per rank is no whole number of blocks.",
        f"Use a smaller --tensor-parallel-size or expert parallelism. {BY_CHANNEL}",
    ),
    KnownError(
        "vllm-moe-down-block", "vLLM", r"input_size of down's weight = \d+ is not divisible",
        "The input_size of down's weight = 192 is not divisible by weight quantization block_k = 128.",
        "The experts' intermediate size per rank is no whole number of blocks.",
        f"Use a smaller --tensor-parallel-size. {BY_CHANNEL}",
    ),
    KnownError(
        "vllm-scale-rows", "vLLM", r"start \(\d+\) \+ length \(\d+\) exceeds dimension size",
        "RuntimeError: start (3) + length (1) exceeds dimension size (3).",
        "Shards of a merged matrix are no whole blocks, so their scale rows do not fit the merged grid.",
        f"{IN_VLLM} {BY_CHANNEL}",
    ),
    KnownError(
        "vllm-no-parameter-scale", "vLLM", r"no module or parameter named '?[\w.]*scale(_inv)?'?",
        "ValueError: There is no module or parameter named 'lm_head.weight_scale' in LlamaForCausalLM.",
        "The file holds a scale for a module that vLLM builds in 16 bit (head, router, skipped layer), or under a name "
        "of another format: native block is weight_scale_inv, compressed-tensors weight_scale.",
        f"{IN_VLLM} {FIX_COPY}",
    ),
    KnownError(
        "vllm-no-parameter", "vLLM", r"There is no module or parameter named",
        "ValueError: There is no module or parameter named 'model.layers.0.mlp.experts.gate_up_proj' in Qwen3MoeModel.",
        "A tensor has a name that vLLM's model does not know: another architecture, stacked experts, or adapters.",
        IN_VLLM,
    ),
    KnownError(
        "vllm-keyerror-scale", "vLLM", r"KeyError: '[\w.]*(weight_scale|input_scale)\w*'",
        "KeyError: 'layers.0.mlp.experts.w13_weight_scale'",
        "The file holds a scale that this model's loader has no parameter for.",
        f"{IN_VLLM} {AGAIN}",
    ),
    KnownError(
        "vllm-dtype-mismatch", "vLLM", r"Attempted to load weight .* with dtype .* into parameter with dtype",
        "Attempted to load weight x with dtype torch.bfloat16 into parameter with dtype torch.float8_e4m3fn",
        "The skip list does not match: vLLM matches native fp8 names exactly and in full, so a 16-bit weight "
        "is cast to "
        "FP8 without a scale, or codes are read as weights. The server starts and talks nonsense.",
        f"Write full module names into the skip list. {FIX_COPY}",
    ),
    KnownError(
        "vllm-not-initialized", "vLLM", r"weights were not initialized from checkpoint",
        "ValueError: Following weights were not initialized from checkpoint: "
        "{'model.layers.1.mlp.down_proj.weight_scale_inv'}",
        "Tensors are missing from the shards, often scales that the index still lists.",
        f"{IN_VLLM} {AGAIN}",
    ),
    KnownError(
        "vllm-shape-assert", "vLLM",
        r"assert param_data\.shape == loaded_weight\.shape|param_data\.shape == loaded_weight",
        "assert param_data.shape == loaded_weight.shape",
        "A tensor has another shape than its parameter: a channel scale that is not [N, 1], a scale grid of another "
        "block size, or a transposed weight.",
        f"{IN_VLLM} {FIX_COPY}",
    ),
    KnownError(
        "vllm-block-static", "vLLM, SGLang", r"block-wise quantization only supports dynamic activation",
        "The block-wise quantization only supports dynamic activation scheme for now, but got static "
        "activation scheme.",
        "weight_block_size and activation_scheme static exclude each other.",
        f'Write "activation_scheme": "dynamic". {FIX_COPY}',
    ),
    KnownError(
        "vllm-activation-scheme", "vLLM, SGLang", r"Unsupported activation scheme",
        "ValueError: Unsupported activation scheme per_token",
        "Native fp8 knows static and dynamic.",
        'Write "activation_scheme": "dynamic" into quantization_config.',
    ),
    KnownError(
        "vllm-config-key", "vLLM, SGLang", r"Cannot find any of \[.*\] in the model's quantization config",
        "ValueError: Cannot find any of ['activation_scheme'] in the model's quantization config.",
        "quantization_config lacks a key that has no default.",
        f"Add it. {FIX_COPY}",
    ),
    KnownError(
        "vllm-method-conflict", "vLLM", r"Quantization method specified in the model config \(.*\) does not match",
        "Quantization method specified in the model config (compressed-tensors) does not match the quantization method "
        "specified in the `quantization` argument (fp8).",
        "--quantization contradicts the checkpoint.",
        "Leave --quantization out: vLLM reads the method from config.json. `octavo serve DIR --dry-run` "
        "prints the command.",
    ),
    KnownError(
        "vllm-min-capability", "vLLM", r"quantization method \S+ is not supported for the current GPU",
        "The quantization method fp8 is not supported for the current GPU. Minimum capability: 75. Current "
        "capability: 70.",
        "The GPU is older than the method allows.",
        "Serve on SM75 or newer, or dequantize and serve in 16 bit.",
    ),
    KnownError(
        "vllm-scheme-capability", "vLLM", r"Quantization scheme is not supported for the current GPU",
        "Quantization scheme is not supported for the current GPU. Min capability: 89. Current capability: 80.",
        "This scheme needs FP8 tensor cores.",
        BY_CHANNEL,
    ),
    KnownError(
        "vllm-no-scaledmm-kernel", "vLLM", r"Failed to find a kernel that can implement the ScaledMM",
        "ValueError: Failed to find a kernel that can implement the ScaledMM linear layer. Reasons: ...",
        "No FP8 kernel takes this scheme here; on CPUs block scales need AMX, and weight-only has none.",
        BY_CHANNEL,
    ),
    KnownError(
        "vllm-no-kernel", "vLLM", r"Failed to find a kernel|requires AMX tile support",
        "Failed to find a kernel ... requires AMX tile support",
        "No kernel for this scheme on this device.",
        f"`octavo verify DIR --gpu GPU` says which kernel a GPU gets. {BY_CHANNEL}",
    ),
    KnownError(
        "vllm-no-moe-backend", "vLLM", r"No FP8 MoE backend supports",
        "No FP8 MoE backend supports the deployment configuration.",
        "No grouped FP8 kernel for this combination of scales, GPU and parallelism.",
        f"Try without expert parallelism. {BY_CHANNEL}",
    ),
    KnownError(
        "vllm-moe-schemes", "vLLM", r"All MoE projections need to have same quantization scheme",
        "ValueError: All MoE projections need to have same quantization scheme but found multiple",
        "gate, up and down of the experts are quantized differently, or one of them is ignored.",
        AGAIN,
    ),
    KnownError(
        "vllm-moe-static-channel", "vLLM", r"FP8 Fused MoE layer, we require either per tensor or channelwise",
        "For FP8 Fused MoE layer, we require either per tensor or channelwise, dynamic per token quantization.",
        "Experts with channel scales need dynamic activations.",
        "`octavo quantize MODEL OUT --scheme channel` makes them dynamic.",
    ),
    KnownError(
        "vllm-ct-no-scheme", "vLLM, SGLang", r"No compressed-tensors compatible scheme was found",
        "NotImplementedError: No compressed-tensors compatible scheme was found for layer_name='model.layers.0...'",
        "The combination of strategy, type, activations and format has no implementation (FP8 groups, wrong format).",
        BY_CHANNEL,
    ),
    KnownError(
        "vllm-ct-embedding", "vLLM", r"compressed-tensors embeddings only support weight-only INT",
        "compressed-tensors embeddings only support weight-only INT group/channel (WNA16) quantization",
        "The embedding is targeted by an FP8 group.",
        f"Add it to the ignore list and keep it in 16 bit. {AGAIN}",
    ),
    KnownError(
        "vllm-no-native-fp8", "vLLM", r"does not have native support for FP8 computation",
        "Your GPU does not have native support for FP8 computation but FP8 quantization is being used.",
        "Weight-only: decoded to 16 bit on the fly (Marlin). Right below SM89; on SM89 it means block "
        "scales, for which "
        "vLLM has no W8A8 kernel there.",
        f"Nothing to do on SM75 to SM86. On SM89: {BY_CHANNEL}",
    ),
    KnownError(
        "vllm-cutlass-capability", "vLLM", r"No compiled cutlass_scaled_mm for",
        "No compiled cutlass_scaled_mm for CUDA device capability: 120. Required capability: 90 or 100",
        "This wheel was built without CUTLASS kernels for the GPU.",
        "Install a wheel built for it, or start with `VLLM_DISABLED_KERNELS=CutlassFp8BlockScaledMMKernel "
        "vllm serve DIR`.",
    ),
    KnownError(
        "vllm-cutlass-helper", "vLLM", r"scaled_mm_helper\.hpp|dispatch_scaled_mm",
        "RuntimeError: dispatch_scaled_mm ... scaled_mm_helper.hpp:17",
        "The CUTLASS kernel does not take these scales on this GPU (block scales on SM120 in some wheels).",
        "`VLLM_DISABLED_KERNELS=CutlassFp8BlockScaledMMKernel vllm serve DIR`, or channel scales.",
    ),
    KnownError(
        "vllm-cutlass-block-89", "vLLM", r"device compute capability of 89 is not supported",
        "The device compute capability of 89 is not supported.",
        "CUTLASS block kernels start at SM90.",
        BY_CHANNEL,
    ),
    KnownError(
        "vllm-deepgemm-recipe", "vLLM, SGLang", r"Unknown recipe",
        "RuntimeError: Unknown recipe (deep_gemm/csrc/utils/layout.hpp)",
        "DeepGEMM has no kernel for this scale layout on this GPU (seen on SM120).",
        "`VLLM_USE_DEEP_GEMM=0 vllm serve DIR`.",
    ),
    KnownError(
        "vllm-deepgemm-ue8m0", "vLLM, SGLang",
        r"Unsupported.*sf.*(ue8m0|scale)|scaling factor.*must be.*ue8m0|use_ue8m0",
        "Assertion error: scaling factor must be packed UE8M0 on SM100",
        "On Blackwell DeepGEMM takes power-of-two scales only.",
        "`octavo quantize MODEL OUT --scheme block128 --scale-format po2`.",
    ),
    KnownError(
        "vllm-kv-default-scale", "vLLM", r"Using KV cache scaling factor 1\.0 for fp8",
        "Using KV cache scaling factor 1.0 for fp8_e4m3. This may cause accuracy issues.",
        "The KV cache is FP8 and the checkpoint holds no calibrated k and v scales.",
        "`octavo calibrate MODEL --data D --out scales.json`, or serve with --kv-cache-dtype auto.",
    ),
    KnownError(
        "vllm-kv-scalar", "vLLM", r"KV-cache scale expects a scalar|per-tensor scaling factor for fp8 KV",
        "KV-cache scale expects a scalar weight, got shape torch.Size([8])",
        "k_scale or v_scale has more than one element.",
        "Store one value per layer; scales per head need strategy attn_head and FlashAttention.",
    ),
    KnownError(
        "vllm-kv-e5m2", "vLLM", r"fp8_e5m2 kv-cache is not supported with fp8 checkpoints",
        "fp8_e5m2 kv-cache is not supported with fp8 checkpoints.",
        "With FP8 weights the KV cache may be e4m3 only.",
        "Serve with --kv-cache-dtype auto, or fp8 on SM89 and newer.",
    ),
    KnownError(
        "vllm-kv-not-found", "vLLM", r"Found [kvq]_scale in the checkpoint .*but not found the expected name",
        "Found k_scale in the checkpoint (e.g. x), but not found the expected name in the model (e.g. y). "
        "k_scale is not loaded.",
        "KV scales under a name that this model's attention does not have: they are dropped.",
        "Name them ...self_attn.k_scale and ...self_attn.v_scale; `octavo verify DIR` lists the spellings it found.",
    ),
    KnownError(
        "vllm-tied-skipped", "vLLM", r"was skipped because it is tied to|is tied to .* not (found|in)",
        "ValueError: lm_head.weight was skipped because it is tied to model.embed_tokens.weight",
        "The config ties head and embedding, and the embedding itself is not in the folder.",
        "Save the embedding, or set tie_word_embeddings to false and keep lm_head.",
    ),
    KnownError(
        "vllm-tied-modelopt", "vLLM", r"tie_weights.*NotImplemented|NotImplementedError.*tie_weights",
        "NotImplementedError in tie_weights of ModelOptFp8LinearMethod",
        "ModelOpt quantizes a head that is tied to the embedding.",
        "Exclude lm_head: add it to `ignore` in quantization_config.",
    ),
    KnownError(
        "vllm-modelopt-algo", "vLLM", r"ModelOpt currently only supports",
        "ValueError: ModelOpt currently only supports: ['FP8', ...] quantizations in vLLM.",
        "quant_algo is one that this vLLM does not know.",
        "Update vLLM, or write compressed-tensors: `octavo quantize MODEL OUT --layout ct`.",
    ),
    KnownError(
        "vllm-fp16-output", "vLLM", r"For FP8 input, output must have dtype BF16",
        "RuntimeError: For FP8 input, output must have dtype BF16",
        "The model runs in float16, and this FP8 kernel writes bfloat16 only.",
        "`vllm serve DIR --dtype bfloat16`, or write dtype bfloat16 into config.json.",
    ),
    KnownError(
        "vllm-group-quant-k", "vLLM, SGLang",
        r"last dimension of .* must be divisible by .group_size|per_token_group_quant",
        "AssertionError: the last dimension of `x` 192 must be divisible by `group_size` 128",
        "Block scales on a matrix whose input dimension is no multiple of 128: it loads, and stops in the "
        "first forward.",
        f"Keep that matrix in 16 bit or give it channel scales. {AGAIN}",
    ),
    KnownError(
        "vllm-heads-tp", "vLLM, SGLang", r"attention heads .* must be divisible by tensor parallel size",
        "Total number of attention heads (28) must be divisible by tensor parallel size (8).",
        "The tensor-parallel size does not divide the attention heads.",
        "`octavo verify DIR` prints the largest size that works.",
    ),
)  # fmt: skip
