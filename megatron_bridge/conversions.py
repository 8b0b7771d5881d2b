"""The conversions by name: what is read, and how it is to be written. `convert` executes them.

Called by the command line and by the benchmark. Reads headers and small files only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from megatron_bridge.convert import Conversion
from megatron_bridge.errors import ConversionError
from megatron_bridge.io.companions import companions, meta_companions
from megatron_bridge.io.formats import format_of, open_checkpoint, stored_dtypes
from megatron_bridge.io.hf_store import hf_spec, hf_target, open_hf
from megatron_bridge.io.megatron_spec import config_folder, megatron_spec
from megatron_bridge.io.meta import open_meta
from megatron_bridge.io.store import Form, Stored, Target
from megatron_bridge.io.torch_dist_target import Extent, torch_dist_target
from megatron_bridge.layouts.quantized import FP8
from megatron_bridge.layouts.torch_dist import default_layout
from megatron_bridge.models.arguments import megatron_arguments
from megatron_bridge.models.checks import check_layout
from megatron_bridge.models.families import canonical_tensors, read_config
from megatron_bridge.models.released import load_sizes
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.spec import ModelSpec, Part

DTYPES = ("bfloat16", "float16", "float32")
_NEVER_FP8 = {  # of matrices: what DeepSeek's checkpoints and vLLM keep wide
    Part.EMBEDDING,
    Part.HEAD,
    Part.ROUTER,
    Part.SHARED_SWITCH,
    Part.MTP_PROJECTION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a conversion can be asked for."""

    dtype: str = ""  # one of `DTYPES`; "": each tensor keeps its own
    fp8: bool = False  # Hugging Face only: linear layers' weights in blocks with scales
    mtp: bool = True  # keep the layers that predict further tokens
    arguments: bool = True  # Megatron-LM's, in a new Megatron checkpoint
    layout: TrainerLayout = field(default_factory=TrainerLayout)  # a model's new Megatron layout
    max_file_bytes: int = 5 << 30
    workers: int = 2
    is_dry: bool = False  # nothing will be read: sizes alone will do for a source


def hf_to_megatron(source: Path, folder: Path, options: Options) -> Conversion:
    """Convert a Hugging Face folder to a distributed checkpoint of Megatron-Core.

    Raises:
        ConversionError: a source that is damaged or unsupported.
        PlanError: a parallel layout that does not fit the model.
    """
    stored = _open_hf(source, options)
    spec, layout = stored.spec, options.layout
    check_layout(spec, layout)
    if options.fp8:
        raise ConversionError("fp8 is of Hugging Face folders alone: Megatron-Core stores none")
    form = _form(stored, options, keeps_fp8=False)
    dtype = _plain_dtype(form)
    torch_dist = default_layout(spec, layout.vocab_divisor * layout.tp)
    arguments = None
    if options.arguments:
        arguments = {
            **megatron_arguments(spec, dtype=dtype, padded_vocab_size=torch_dist.vocab_rows),
            "make_vocab_size_divisible_by": layout.vocab_divisor,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
        }
    beside = companions(stored.folder, spec, dtype=dtype)
    extent = Extent(file_bytes=options.max_file_bytes)
    target = torch_dist_target(spec, form, torch_dist, beside, arguments, extent)
    return _conversion(stored, target, folder, options)


def megatron_to_hf(source: Path, folder: Path, config: Path | None, options: Options) -> Conversion:
    """Convert a Megatron checkpoint, distributed or of single ranks, to a Hugging Face folder.

    Args:
        config: gives the model's sizes, and from a folder tokenizer and configuration too, where
            they do not lie beside the weights.
    """
    stored = open_any(source, config, mtp=options.mtp)
    beside = config if config and config.is_dir() else config_folder(source) or stored.folder
    return _to_hf(stored, beside, folder, options)


def hf_to_hf(source: Path, folder: Path, options: Options) -> Conversion:
    """Write a Hugging Face folder anew: in another dtype, FP8 or no more FP8, other files."""
    stored = _open_hf(source, options)
    return _to_hf(stored, stored.folder, folder, options)


def meta_to_hf(
    source: Path, folder: Path, release: str, options: Options, *, instruct: bool = False
) -> Conversion:
    """Convert an original Llama to a Hugging Face folder."""
    stored = open_meta(source, release=release)
    form = _form(stored, options, keeps_fp8=True)
    small = meta_companions(
        source, stored.spec, release=release, dtype=_plain_dtype(form), instruct=instruct
    )
    target = hf_target(stored.spec, form, small, options.max_file_bytes)
    return _conversion(stored, target, folder, options)


def _to_hf(stored: Stored, beside: Path, folder: Path, options: Options) -> Conversion:
    form = _form(stored, options, keeps_fp8=True)
    small = companions(
        beside, stored.spec, dtype=_plain_dtype(form), quantized=bool(form.quantized)
    )
    target = hf_target(stored.spec, form, small, options.max_file_bytes)
    return _conversion(stored, target, folder, options)


def _conversion(stored: Stored, target: Target, folder: Path, options: Options) -> Conversion:
    return Conversion(source=stored, target=target, folder=folder, workers=options.workers)


# --- Sources ----------------------------------------------------------------------------------


def open_any(source: Path, config: Path | None, *, mtp: bool = True) -> Stored:
    """Describe a checkpoint of any format but the original Llama's.

    Args:
        config: says the sizes of a Megatron model, where nothing in its folder does.

    Raises:
        ConversionError: no such checkpoint, a damaged one, or one whose sizes nothing says.
    """
    if config is not None:
        spec = load_sizes(config)
    else:
        spec = None if format_of(source) == "hf" else megatron_spec(source)
    return open_checkpoint(source, spec, mtp=mtp)


def _open_hf(source: Path, options: Options) -> Stored:
    has_weights = source.is_dir() and any(source.glob("*.safetensors*"))
    if options.is_dry and not has_weights:
        return imagined(source, options)
    return open_hf(source, mtp=options.mtp)


def imagined(source: Path, options: Options) -> Stored:
    """Return the checkpoint that a ``config.json``, or a folder with nothing else, describes."""
    config = read_config(source) if source.is_dir() else {}
    spec = hf_spec(source) if source.is_dir() else load_sizes(source)
    spec = spec if options.mtp else spec.without_mtp()
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    form = Form(
        dtypes={tensor.name: tensor.dtype or dtype for tensor in canonical_tensors(spec)},
        quantized=_linear(spec) if "quantization_config" in config else frozenset(),
    )
    target = hf_target(spec, form, {})
    chunks = {(0, name): found for file in target.files for name, found in file.chunks.items()}
    folder = source if source.is_dir() else source.parent
    return Stored(folder=folder, format="hf", spec=spec, side=target.side, chunks=chunks)


# --- Dtypes -----------------------------------------------------------------------------------


def _linear(spec: ModelSpec) -> frozenset[str]:
    """Return what may be FP8."""
    return frozenset(
        tensor.name
        for tensor in canonical_tensors(spec)
        if len(tensor.shape) == 2 and tensor.part not in _NEVER_FP8
    )


def _form(stored: Stored, options: Options, *, keeps_fp8: bool) -> Form:
    """Return how the new checkpoint holds each tensor.

    What is FP8 stays so where nothing else is asked for and the format can, else it becomes
    bfloat16. A tensor that its family keeps in float32 stays in it whatever is asked for.
    """
    stored_as = stored_dtypes(stored)
    kept = [name for name, dtype in stored_as.items() if dtype == FP8]
    quantized = _linear(stored.spec) if options.fp8 else frozenset[str]()
    if keeps_fp8 and not options.dtype:
        quantized |= frozenset(kept)
    dtypes: dict[str, str] = {}
    for tensor in canonical_tensors(stored.spec):
        plain = "bfloat16" if stored_as[tensor.name] == FP8 else stored_as[tensor.name]
        dtypes[tensor.name] = plain if tensor.dtype else options.dtype or plain
    return Form(dtypes=dtypes, quantized=quantized)


def _plain_dtype(form: Form) -> str:
    """Return the dtype of most tensors that are not quantized."""
    plain = Counter(dtype for name, dtype in form.dtypes.items() if name not in form.quantized)
    return plain.most_common(1)[0][0]
