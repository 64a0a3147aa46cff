"""What SGLang, Transformers, compressed-tensors, PEFT, Triton, PyTorch and cuBLAS say about FP8, and what it means."""

from octavo.workflows.rules.errors import AGAIN, BY_CHANNEL, FIX_COPY, VERIFY, KnownError

IN_SGLANG = VERIFY.format("sglang")

OTHER_ERRORS = (
    KnownError(
        "sglang-not-in-params", "SGLang", r"Parameter .* not found in params_dict",
        "Parameter model.layers.0.mlp.down_proj.weight_scale not found in params_dict",
        "SGLang's Llama loader renames weight_scale_inv to weight_scale and then drops native block scales: the server "
        "starts and talks nonsense.",
        "Write compressed-tensors, a lossless rename: `octavo requantize DIR OUT --for sglang:GPU`.",
    ),
    KnownError(
        "sglang-weight-only-block", "SGLang", r"Unsupported weight strategy",
        "ValueError: Unsupported weight strategy=block, supported strategies are [channel, tensor]",
        "Below SM89 SGLang runs compressed-tensors weight-only, which takes no block scales.",
        BY_CHANNEL,
    ),
    KnownError(
        "sglang-no-target", "SGLang", r"Unable to find matching target for",
        "ValueError: Unable to find matching target for model.layers.0.self_attn.o_proj in the "
        "compressed-tensors config.",
        "A linear is neither targeted nor ignored, which vLLM takes as 16 bit and SGLang as an error.",
        f"Add it to the ignore list by its full name. {FIX_COPY}",
    ),
    KnownError(
        "sglang-modelopt-regular", "SGLang", r"ModelOptFp8Config only supports (regular|static) FP8",
        "ModelOptFp8Config only supports regular FP8 quantization, but found 'FP8_PB_WO'.",
        "SGLang takes only quant_algo FP8 from ModelOpt.",
        "Write compressed-tensors: `octavo quantize MODEL OUT --layout ct`.",
    ),
    KnownError(
        "sglang-shards", "SGLang", r"Found different quantization schemes for \[.*\] in",
        "Found different quantization schemes for ['q_proj', 'k_proj', 'v_proj'] in "
        "model.layers.0.self_attn.qkv_proj. SGLang",
        "The ignore list names only some shards of a merged matrix.",
        f"List all shards or none. {AGAIN}",
    ),
    KnownError(
        "sglang-lm-head-keyerror", "SGLang", r"KeyError: 'lm_head\.weight'",
        "KeyError: 'lm_head.weight'",
        "The checkpoint stores a head although config.json ties it to the embedding, or the other way round.",
        f"Make tie_word_embeddings agree with the files. {IN_SGLANG}",
    ),
    KnownError(
        "hf-not-divisible-grid", "Transformers", r"Weight shape \(.*\) not divisible by scale grid",
        "ValueError: Weight shape (576, 256) not divisible by scale grid (5, 2).",
        "While dequantizing, Transformers derives the block from the scale's shape, which fails for a ragged "
        "last block.",
        f"Load it with `octavo.load(DIR)`, which knows the block, or quantize by channel. {BY_CHANNEL}",
    ),
    KnownError(
        "hf-fp8-needs-gpu", "Transformers", r"No GPU or XPU found\. A GPU or XPU is needed for FP8",
        "RuntimeError: No GPU or XPU found. A GPU or XPU is needed for FP8 quantization.",
        "FineGrainedFP8Config quantizes on a GPU only.",
        "`octavo quantize MODEL OUT` needs no GPU; OctavoConfig quantizes while loading on any device.",
    ),
    KnownError(
        "hf-fp8-capability", "Transformers",
        r"FP8 quantized models is only supported on GPUs with compute capability >= 8\.9",
        "FP8 quantized models is only supported on GPUs with compute capability >= 8.9 (e.g 4090/H100), "
        "actual = `8.0`.",
        "Transformers dequantizes the whole model to BF16 on this GPU: it works, and takes twice the memory.",
        "`octavo.load(DIR)` keeps the weights in FP8 on any GPU.",
    ),
    KnownError(
        "hf-dequantize-cpu", "Transformers", r"default to dequantizing the model to bf16",
        "Using FP8 quantized models requires a GPU or XPU, we will default to dequantizing the model to bf16",
        "Without an FP8 GPU, Transformers decodes all weights while loading.",
        "Nothing is wrong; `octavo.load(DIR)` keeps FP8 in memory.",
    ),
    KnownError(
        "hf-kernels-missing", "Transformers", r"finegrained-fp8 kernel unavailable|pip install.*\bkernels\b",
        "ImportError: finegrained-fp8 kernel unavailable: install `kernels`",
        "Transformers fetches its FP8 kernels from the hub at run time.",
        "`pip install kernels` with network access, or `octavo.load(DIR)`, which brings its kernels along.",
    ),
    KnownError(
        "hf-conversion-report", "Transformers", r"encountered some issues during automatic conversion of the weights",
        "RuntimeError: We encountered some issues during automatic conversion of the weights.",
        "Weights and scales do not fit together: ragged blocks, experts of which some lack a scale, or "
        "experts with block "
        "scales in compressed-tensors.",
        VERIFY.format("transformers"),
    ),
    KnownError(
        "hf-mismatched-sizes", "Transformers", r"ignore_mismatched_sizes|size mismatch for .*scale",
        "RuntimeError: You set `ignore_mismatched_sizes` to `False`, thus raising an error.",
        "A tensor has another shape than the model's parameter: a channel scale that is not [N, 1], a scalar where "
        "compressed-tensors wants [1], or a transposed weight.",
        f"{VERIFY.format('transformers')} {FIX_COPY}",
    ),
    KnownError(
        "hf-newly-initialized", "Transformers", r"newly initialized.*scale|Some weights .* were not initialized.*scale",
        "Some weights of LlamaForCausalLM were not initialized from the model checkpoint and are newly initialized: "
        "['model.layers.0.mlp.down_proj.weight_scale']",
        "Scales are missing or have another format's name: the model runs and computes nonsense.",
        f"{VERIFY.format('transformers')} {FIX_COPY}",
    ),
    KnownError(
        "hf-expect-quantized", "Transformers", r"Expect quantized weights but got an unquantized weight",
        "ValueError: Expect quantized weights but got an unquantized weight",
        "The config promises FP8 for a weight that is stored in 16 bit.",
        f"List it in modules_to_not_convert. {FIX_COPY}",
    ),
    KnownError(
        "hf-unknown-quant-method", "Transformers", r"Unknown quantization type, got",
        "ValueError: Unknown quantization type, got modelopt - supported types are: ['awq', 'fp8', ...]",
        "quant_method is one that this Transformers does not know.",
        "Write compressed-tensors: `octavo quantize MODEL OUT --layout ct`.",
    ),
    KnownError(
        "hf-train-quantized", "Transformers", r"cannot perform fine-tuning on purely quantized models",
        "ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters",
        "A Trainer got an FP8 model without adapters.",
        "`octavo finetune run.yaml` attaches LoRA adapters to the FP8 base.",
    ),
    KnownError(
        "hf-not-trainable", "Transformers",
        r"is quantized with .* but that quantization method do(es)?( not|n.t) support",
        "The model you are trying to fine-tune is quantized with QuantizationMethod.FP8 but that "
        "quantization method do not "
        "support training.",
        "Before 5.22 Transformers' FP8 layers had no backward pass.",
        "`octavo finetune run.yaml`, or update Transformers.",
    ),
    KnownError(
        "ct-extra-forbidden", "compressed-tensors", r"Extra inputs are not permitted",
        "weights.scale_format Extra inputs are not permitted [type=extra_forbidden]",
        "quantization_config has a key that compressed-tensors does not know.",
        f"Remove it. {FIX_COPY}",
    ),
    KnownError(
        "ct-actorder", "compressed-tensors",
        r"actorder=?\S* (has been|which has been) removed|activation ordering .*no longer",
        "ValueError: actorder='group' has been removed. Consider using actorder='weight'",
        "Group activation ordering is gone, and has no meaning for FP8.",
        "Remove actorder from the weight arguments.",
    ),
    KnownError(
        "ct-block-structure", "compressed-tensors",
        r"Block strategy requires block structure|Block structure requires block",
        "ValueError: Block strategy requires block structure",
        "strategy block and block_structure go together.",
        'Write "block_structure": [128, 128].',
    ),
    KnownError(
        "ct-static-token", "compressed-tensors", r"Cannot perform static token quantization",
        "ValueError: Cannot perform static token quantization, please use `dynamic=True`",
        "One scale per token is known only while serving.",
        'Write "dynamic": true for input_activations.',
    ),
    KnownError(
        "ct-strict-cdiv", "compressed-tensors",
        r"(not divisible|divisible) by.*block.*(strategy|structure)|strategy_cdiv",
        "strategy_cdiv: 320 is not divisible by block structure 128",
        "A dimension is no whole number of blocks; kernels need it for the input dimension.",
        BY_CHANNEL,
    ),
    KnownError(
        "peft-addmm-float8", "PyTorch", r"\"?addmm\w*\"? not implemented for '?Float8|addmm.*Float8_e4m3fn",
        "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Float8_e4m3fn'",
        "A float8 weight met an ordinary matmul: LoRA or a merge on raw FP8 layers.",
        "`octavo.load(DIR)` gives layers that PEFT can train on; `octavo export RUN OUT` merges.",
    ),
    KnownError(
        "torch-add-float8", "PyTorch", r"(add|mul|sub|abs|norm|copy)\w*\"? not implemented for '?Float8",
        "RuntimeError: \"mul_cuda\" not implemented for 'Float8_e4m3fn'",
        "Float8 tensors have almost no arithmetic: something treats codes as weights.",
        "Dequantize first (`octavo.dequantize`), or load with `octavo.load`.",
    ),
    KnownError(
        "torch-promote-float8", "PyTorch", r"Promotion for Float8 Types is not supported",
        "RuntimeError: Promotion for Float8 Types is not supported, attempted to promote Float8_e4m3fn and BFloat16",
        "An FP8 weight is combined with a 16-bit tensor: no scale has been applied.",
        "Load with `octavo.load(DIR)`; for a merge use `octavo export RUN OUT`.",
    ),
    KnownError(
        "torch-scaled-mm-derivative", "PyTorch", r"derivative for aten::_scaled_mm is not implemented",
        "NotImplementedError: derivative for aten::_scaled_mm is not implemented",
        "FP8 inference layers have no backward pass, and training runs through them.",
        "`octavo finetune run.yaml`: its FP8 layers are differentiable in their input.",
    ),
    KnownError(
        "torch-scaled-mm-capability", "PyTorch",
        r"_scaled_mm is only supported on CUDA devices with compute capability",
        "RuntimeError: torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9",
        "This GPU has no FP8 tensor cores.",
        "Weight-only works here: `octavo.load(MODEL, activation='none')`; `octavo doctor` lists the backends.",
    ),
    KnownError(
        "torch-scaled-mm-divisible", "PyTorch", r"Expected (trailing|both) dimensions? of mat\w* to be divisible by 16",
        "RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (3x100).",
        "FP8 tensor cores need dimensions that are multiples of 16.",
        "Pad the tensor, or keep this layer in 16 bit: `octavo quantize MODEL OUT --skip PATTERN`.",
    ),
    KnownError(
        "torch-scaled-mm-layout", "PyTorch", r"mat_?b must be col(umn)?_?major|Expected b to be col_major",
        "RuntimeError: mat_b must be col_major",
        "torch._scaled_mm wants its second operand transposed: pass w.t() of a row-major w.",
        "`octavo.scaled_mm` takes both operands row-major.",
    ),
    KnownError(
        "torch-scaled-mm-scales", "PyTorch", r"Invalid scaling configuration|scale_[ab] must be (float|a scalar|of)",
        "RuntimeError: Invalid scaling configuration. For TensorWise scaling, both scales should be float with numel 1",
        "The shapes of the scales fit none of tensor, row and block scaling; block scales need CUDA 12.9 and SM90.",
        "`octavo.scaled_mm` takes every granularity; `octavo.why` says which kernel runs.",
    ),
    KnownError(
        "torch-scaled-mm-row-bf16", "PyTorch",
        r"Only bf16 high precision output types? (are|is) supported for row-wise",
        "RuntimeError: Only bf16 high precision output types are supported for row-wise scaling.",
        "Row-wise FP8 matmuls write bfloat16.",
        "Run the model in bfloat16.",
    ),
    KnownError(
        "triton-fp8e4nv", "Triton", r"type fp8e4nv not supported in this architecture",
        "ValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are "
        "('fp8e4b15', 'fp8e5')",
        "A Triton FP8 kernel was routed to a GPU below SM89.",
        f"Use an engine version that takes Marlin there. {BY_CHANNEL}",
    ),
    KnownError(
        "triton-dot-fp8", "Triton", r"(Unsupported|not supported).*tl\.dot.*fp8|dot.*fp8e\w+.*not supported",
        "AssertionError: Dot op does not support fp8e4nv on CUDA arch < 90: not supported",
        "This Triton cannot multiply FP8 on the GPU.",
        "Update Triton, or serve weight-only with channel scales.",
    ),
    KnownError(
        "triton-shared-memory", "Triton", r"out of resource: shared memory",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware "
        "limit: 101376.",
        "The tile of an FP8 kernel is too large for this GPU (101 kB on SM86, SM89 and SM120).",
        "Update the engine, whose table for this GPU is wrong, or use channel scales, which run on CUTLASS.",
    ),
    KnownError(
        "cublas-not-supported", "cuBLAS", r"CUBLAS_STATUS_NOT_SUPPORTED.*cublasLtMatmul|cublasLtMatmulAlgoGetHeuristic",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`",
        "cuBLAS has no FP8 kernel for these shapes, types or scales: dimensions that are no multiples of 16, "
        "or an old CUDA.",
        "`octavo doctor`, then pad the shape or keep that layer in 16 bit.",
    ),
    KnownError(
        "cublas-invalid-value", "cuBLAS", r"CUBLAS_STATUS_INVALID_VALUE.*cublasLt",
        "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasLtMatmul`",
        "An FP8 matmul got operands in a layout or alignment that cuBLAS does not take.",
        "Make the operands contiguous and 16-byte aligned; `octavo.scaled_mm` does.",
    ),
    KnownError(
        "cublas-not-initialized", "cuBLAS", r"CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "Almost always out of GPU memory, not an FP8 error.",
        "Lower --gpu-memory-utilization or the batch; `octavo doctor` shows free memory.",
    ),
    KnownError(
        "peft-merge-quantized", "PEFT", r"Cannot merge (LORA|adapter)|merg\w+.*not supported.*quantiz",
        "ValueError: Cannot merge LORA layers when the model is loaded in 8-bit mode",
        "PEFT cannot merge into this quantized layer.",
        "`octavo export RUN OUT` merges onto the original weights and quantizes once.",
    ),
    KnownError(
        "peft-unsupported-module", "PEFT", r"Target module .* is not supported\. Currently, only",
        "ValueError: Target module FP8Linear() is not supported. Currently, only the following modules are "
        "supported: ...",
        "PEFT does not know this FP8 layer class.",
        "`octavo.load(MODEL)`: its FP8 layers are nn.Linear to PEFT.",
    ),
    KnownError(
        "peft-float8-adapters", "PEFT", r"expected (m1|mat1) and (m2|mat2) to have the same dtype.*Float8",
        "RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != c10::Float8_e4m3fn",
        "Adapter weights were created in float8, or an FP8 weight is multiplied without its scale.",
        "Keep adapters in BF16 or FP32: `octavo finetune run.yaml` does.",
    ),
    KnownError(
        "safetensors-incomplete", "safetensors",
        r"incomplete metadata, file not fully covered|MetadataIncompleteBuffer",
        "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        "The file is shorter or longer than its header says: an interrupted download or write.",
        "Fetch the shard again; `octavo verify DIR` names it.",
    ),
    KnownError(
        "safetensors-header", "safetensors",
        r"HeaderTooLarge|InvalidHeader|header too (large|small)|Error while deserializing header",
        "SafetensorError: Error while deserializing header: HeaderTooLarge",
        "It is no safetensors file; often a Git LFS pointer or an error page saved under that name.",
        "Fetch the shard again (`git lfs pull`, or download it from the hub).",
    ),
    KnownError(
        "safetensors-contiguous", "safetensors", r"trying to save a non contiguous tensor",
        "ValueError: You are trying to save a non contiguous tensor: `model.layers.0.mlp.down_proj.weight`",
        "A transposed view is being saved; forcing it would store [K, N] instead of [N, K].",
        "Save `.contiguous()` of the tensor in its original orientation.",
    ),
)  # fmt: skip
