"""What a comparison runs on: the model, the prompt, the machine, each with its description for the record.

Belongs here: loading, reading, checking what the user named. Must not: run the model, compare, print.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headfit
from headfit import comparison as data
from headfit.ranks import InputError, Rank, usable_cores

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from headfit.layer import MQALayer
    from headfit.width import Policy

DEFAULT_MODEL = "DeepSeek-V4-Flash geometry, small body, random weights"
_PACKAGES = ("torch", "triton", "transformers", "numpy")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


# ---------------------------------------------------------------- checks made before any process starts, without torch


def check_options(options: data.Options) -> None:
    """Raise InputError for a folder that is no checkpoint, ranks that do not divide the heads, a backend that nobody
    knows, or a Transformers that is missing or too old. Imports torch only where a backend is named.
    """
    heads = 64 if options.model is None else _check_checkpoint(Path(options.model).expanduser())
    if options.tp < 1:
        raise InputError(f"--tp is {options.tp} but must be at least 1")
    if heads % options.tp:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise InputError(f"--tp {options.tp} does not divide the model's {heads} heads: use one of {fitting}")
    if options.backend is not None:
        from headfit import kernels

        if options.backend not in kernels.REGISTRY:
            raise InputError(
                f"--backend {options.backend}: no such backend, accepted are {', '.join(kernels.REGISTRY)}; "
                "or leave it out for the first that runs here"
            )
    from headfit.engines import require

    try:
        require("transformers")
    except ImportError as error:
        raise InputError(str(error)) from None


def _check_checkpoint(folder: Path) -> int:
    """The head count of the DeepSeek-V4 checkpoint in `folder`."""
    if not folder.is_dir():
        raise InputError(
            f"--model {folder}: no such folder; give a local checkpoint folder, or leave --model out "
            "for the built-in model"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"--model {folder}: no checkpoint, config.json is missing; give the folder that save_pretrained wrote"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, heads = config.get("model_type"), config.get("num_attention_heads", 64)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"--model {folder}: config.json cannot be read ({_one_line(error)}); give a whole checkpoint folder"
        ) from None
    if kind != "deepseek_v4":
        raise InputError(
            f"--model {folder}: model_type is {kind!r}, accepted is 'deepseek_v4'; give a DeepSeek-V4 checkpoint"
        )
    if not isinstance(heads, int) or heads < 1:
        raise InputError(
            f"--model {folder}: num_attention_heads is {heads!r} in config.json, needed is a positive integer"
        )
    if not any(found for pattern in _WEIGHTS for found in folder.glob(pattern)):
        raise InputError(
            f"--model {folder}: no weights (*.safetensors) beside config.json; give a whole checkpoint folder"
        )
    return heads


def read_prompt(options: data.Options, rank: int = 0) -> bytes:
    """The bytes of the prompt, read once: a pipe (`--prompt <(command)`) gives them to one reader only.

    Ranks other than 0 look whether a file is there and take nothing from a pipe; they are told what rank 0 read. Raises
    InputError for a prompt that cannot be read or is empty.
    """
    if options.prompt is None:
        return readme()
    path = Path(options.prompt).expanduser()
    return b"" if rank != 0 and path.is_fifo() else _read_file(path)


def _read_file(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except IsADirectoryError:
        raise InputError(f"--prompt {path}: is a folder; give a text file") from None
    except OSError as error:
        raise InputError(f"--prompt {path}: {error.strerror or error}; give a text file that can be read") from None
    if not content:
        raise InputError(f"--prompt {path}: is empty; give a file with at least one byte")
    return content


def readme() -> bytes:
    """The project's own README:

    beside the sources in a checkout, else the description in the installed package's metadata.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file() and (root / "README.md").is_file():
        return (root / "README.md").read_bytes()
    text = importlib.metadata.metadata("headfit").json.get("description", "")
    if not text:
        raise InputError("the installed package carries no README: name a text file with --prompt")
    return str(text).encode()


# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Subject:
    """A converted model with its attention layers, and how to turn text into tokens and back."""

    model: Any
    attention: tuple[MQALayer, ...]
    tokenizer: Any
    name: str

    def new_cache(self) -> Any:
        """An empty cache for one sequence."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits [1, 1, vocabulary] of the last of `ids` [1, n], appended to `cache`."""
        # Transformers renamed the argument in 5.18; the new name is looked for, not a version.
        parameters = inspect.signature(inspect.unwrap(type(self.model).forward)).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache}).logits

    def set_policy(self, policy: Policy) -> None:
        """Plan every attention call by `policy` from now on."""
        for layer in self.attention:
            layer.policy = policy

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a continuation; bytes are shown escaped."""
        if self.tokenizer is None:
            return repr(bytes(token % 256 for token in tokens))[2:-1]
        return str(self.tokenizer.decode(list(tokens)))


@dataclass(frozen=True)
class Prompt:
    """The tokens that run, where they come from, and how many the whole file has."""

    tokens: list[int]
    name: str
    total: int


def load(options: data.Options, group: ProcessGroup | None, device: torch.device) -> Subject:
    """Build or load the model and convert it to this rank's heads. Raises InputError for what the user can fix."""
    import torch

    try:
        from headfit import kernels
        from headfit.engines.transformers import convert
        from headfit.layer import MQALayer
        from headfit.width import Policy
    except ImportError as error:
        raise InputError(f"compare needs {error.name}: pip install 'headfit[compare]'") from None
    torch.manual_seed(options.seed)
    tokenizer = None
    if options.model is None:
        from headfit import demo_model

        model: Any = demo_model.build(options.seed, device=device)
        name = DEFAULT_MODEL
    else:
        folder = Path(options.model).expanduser()
        model, tokenizer = _from_folder(folder, device)
        name = folder.resolve().name
    try:
        convert(
            model,
            group,
            Policy.padded(),
            cache_layout=options.cache_layout,
            backend=options.backend,
            keep_original=False,
        )
        attention = tuple(module for module in model.modules() if isinstance(module, MQALayer))
        attention[0]._backend_on(device)  # asks whether the backend runs here
    except (kernels.BackendUnavailable, ImportError, ValueError) as error:
        raise InputError(_one_line(error)) from None
    return Subject(model, attention, tokenizer, name)


def _from_folder(folder: Path, device: torch.device) -> tuple[Any, Any]:
    import torch
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    # float32 on a CPU, for the reason that `demo_model.build` gives.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype == torch.bfloat16 and not _norms_keep_bfloat16():
        raise InputError(
            "this Transformers multiplies bfloat16 by its float32 norm weights and cannot run DeepSeek-V4 in bfloat16: "
            "install 5.24 or newer, or use --device cpu"
        )
    try:
        model, info = DeepseekV4ForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True
        )
        has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_tokenizer else None
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file makes the loaders raise
        raise InputError(
            f"--model {folder}: cannot be loaded ({_one_line(error)}); give a whole DeepSeek-V4 checkpoint"
        ) from None
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"--model {folder}: {len(missing)} weights are missing, such as {missing[0]}; give a whole checkpoint"
        )
    if device.type == "cpu":
        model.set_experts_implementation("eager")  # grouped GEMMs want bfloat16
    return model.to(device).eval(), tokenizer


def _norms_keep_bfloat16() -> bool:
    """Whether a norm, whose weight stays float32, returns its input's dtype. Releases such as 5.17 return float32."""
    import torch
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

    return DeepseekV4RMSNorm(8)(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def tokenize(content: bytes, options: data.Options, subject: Subject) -> Prompt:
    """The prompt's `content` as tokens: the tokenizer's, or one a byte where the checkpoint has none."""
    name = "README.md of headfit" if options.prompt is None else Path(options.prompt).name
    vocabulary = subject.model.config.vocab_size
    if subject.tokenizer is None:
        if vocabulary < 256:
            raise InputError(
                f"the checkpoint has no tokenizer and {vocabulary} tokens, too few for bytes: add its tokenizer files"
            )
        tokens = list(content)
    else:
        try:
            tokens = list(subject.tokenizer(content.decode())["input_ids"])
        except UnicodeDecodeError:
            raise InputError(f"--prompt {name}: is no UTF-8 text; give a text file") from None
    total = len(tokens)
    if total == 0:
        raise InputError(f"--prompt {name}: the tokenizer makes no token of it; give a longer text")
    return Prompt(tokens[: options.prompt_tokens] if options.prompt_tokens else tokens, name, total)


# ---------------------------------------------------------------- for the record


def describe(
    options: data.Options, subject: Subject, prompt: Prompt, chunks: int, policies: tuple[Policy, Policy]
) -> data.Workload:
    """The workload in words and numbers."""
    config, first = subject.model.config, subject.attention[0]
    ratio = config.compress_rates["compressed_sparse_attention"]
    chosen_from = len(prompt.tokens) // ratio
    backend, _ = first._backend_on(first.sinks.device)
    return data.Workload(
        model=subject.name,
        layers=config.num_hidden_layers,
        heads=first.geometry.n_heads,
        dtype=str(subject.model.dtype).removeprefix("torch."),
        prompt=prompt.name,
        prompt_tokens=len(prompt.tokens),
        prompt_tokens_all=prompt.total,
        chunks=chunks,
        new_tokens=options.new_tokens,
        backend=backend,
        cache_layout=options.cache_layout,
        policy_off=policies[0].kind,
        policy_on=policies[1].kind,
        sparse="compressed_sparse_attention" in config.layer_types and chosen_from > config.index_topk,
    )


def environment(rank: Rank, device: torch.device, started: str, devices: tuple[str, ...]) -> data.Environment:
    """The machine and the software, read here, so that a figure is never without them."""
    import torch

    packages = []
    for name in _PACKAGES:
        try:
            packages.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional one that is not there
    if torch.version.cuda:
        packages.append(("CUDA", torch.version.cuda))
    group = "one process" if rank.world == 1 else "NCCL" if device.type == "cuda" else "gloo"
    return data.Environment(
        packages=(("python", platform.python_version()), ("headfit", headfit.__version__), *packages),
        commit=_commit(),
        platform=platform.platform(terse=True),
        cpu=_cpu_name(),
        cores=usable_cores(),
        threads_per_rank=torch.get_num_threads(),
        devices=devices,
        group=group,
        started=started,
    )


def _commit() -> str:
    """The commit of the checkout this package runs from, with `+changes` where tracked files differ;

    "" when installed.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return ""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", os.fspath(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")  # on Linux
    for line in listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
