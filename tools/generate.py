"""torchvm generate: speculative decoding of prompts, and what the compiler made of the mask."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from torchvm.tools.files import refuse_unwritable, write_file
from torchvm.tools.messages import CommandError, progress
from torchvm.tools.models import PACKAGED, SMALL, Tokenizer, load_model, small_model
from torchvm.tools.prompts import read_prompts

__all__ = ["generate"]


_BATCH = 8
_NODES = 1024


class MaskModeName(StrEnum):
    """Values of --mask-mode."""

    full = "full"
    qlen = "qlen"
    packed = "packed"


class Inner(StrEnum):
    """Values of --inner."""

    inductor = "inductor"
    aot_eager = "aot_eager"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What to continue or answer.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts in place of PROMPT: a line each; in a .jsonl file a JSON string each, "
            "or an object with a `prompt`.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help=f"Prompts that decode together; by default all, up to {_BATCH}."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help=f"{PACKAGED!r} (SmolLM2-135M), a folder with a Llama-like model, or {SMALL!r}: "
            "random weights, in the kinds of layer that the back end attends in."
        ),
    ] = PACKAGED,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Attention back end that verifies and owns the mask: cpu, deepseek-v4, "
            "flash-attention, flashinfer, flashmla, hybrid-attention, hybrid-linear, triton, "
            "triton-unified, trtllm-mla, two-batch. By default the step allocates its mask itself."
        ),
    ] = None,
    topk: Annotated[
        int,
        typer.Option(min=1, max=_NODES, help="Most children of a node; 1 drafts a chain."),
    ] = 2,
    depth: Annotated[
        int, typer.Option(min=1, max=_NODES, help="Most drafted tokens on a path.")
    ] = 4,
    num_draft_tokens: Annotated[
        int, typer.Option(min=2, max=_NODES, help="Nodes of a tree, root included.")
    ] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    max_context_len: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens with the prompt; by default a power of two."),
    ] = None,
    mask_mode: Annotated[
        MaskModeName | None,
        typer.Option(
            help="The layout that the step's own mask is declared in; full by default. A back "
            "end's mask has the layout that a plan finds."
        ),
    ] = None,
    inner: Annotated[
        Inner, typer.Option(help="What compiles the graph after torchvm's passes.")
    ] = Inner.inductor,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Threads; by default one per available core."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Whether to apply the model's chat template, if any."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail unless plain decoding gives the same tokens.")
    ] = False,
    compare: Annotated[
        bool, typer.Option(help="Whether to decode plainly too, for its speed and tokens.")
    ] = True,
    draft_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft by the model's first layers, so many, instead of by prompt lookup.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sample at this temperature; 0 decodes greedily.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample among the tokens of this mass.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample among so many tokens; 0: among all.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of the samples.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End where this text comes up; may be given several times."),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write each step's tree and what it accepted, for `torchvm tree --record`.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Generate text with draft trees, verified by one compiled graph a step.

    Prints the text, how many drafts were accepted, the speed beside plain decoding, and the
    layout that the compiler gave the verify mask.
    """
    from torchvm.errors import TorchvmError
    from torchvm.tools.generate_report import as_dict, as_text
    from torchvm.tools.generate_run import Settings, run
    from torchvm.tools.step_record import Header, Recorder, Sampling

    if (prompt is None) == (prompts_file is None):
        raise typer.BadParameter("give a PROMPT or a --prompts-file, and not both")
    if batch_size is not None and prompts_file is None:
        raise CommandError("--batch-size is for prompts of a file: give --prompts-file")
    if stream and prompts_file is not None:
        raise CommandError("--stream shows one text: leave --prompts-file out")
    if backend is not None and mask_mode is not None:
        raise CommandError("--mask-mode is for the step's own mask: leave it or --backend out")
    if stream and as_json:
        raise CommandError("--stream prints text: leave --json out")
    if any(not text for text in stop or ()):
        raise CommandError("--stop must be a text, got an empty one")
    if not math.isfinite(temperature):
        raise CommandError(f"--temperature must be finite, got {temperature}")
    if temperature == 0 and (top_p, top_k) != (1.0, 0):
        raise CommandError("--top-p and --top-k need --temperature: 0 decodes greedily")
    if check and temperature > 0:
        raise CommandError("--check compares greedy tokens: leave --temperature out")
    if check and not compare:
        raise CommandError("--check needs plain decoding: leave --no-compare out")
    if record is not None:
        refuse_unwritable(record)
    texts = [_text(prompt or "")] if prompts_file is None else read_prompts(prompts_file)
    with progress("Loading the model"):
        lm, tokenizer = small_model(backend) if model == SMALL else load_model(model)
    recorder = None if record is None else Recorder(tokenizer.decode)
    settings = Settings(
        drafting=(topk, depth, num_draft_tokens),
        max_new_tokens=max_new_tokens,
        max_context_len=max_context_len,
        mask_mode=(mask_mode or MaskModeName.full).value,
        backend=backend,
        inner=inner.value,
        threads=threads,
        compare=compare and temperature == 0,
        draft_layers=draft_layers,
        sampling=(temperature, top_p, top_k, seed) if temperature > 0 else None,
        stop=tuple(stop or ()),
        stream=stream,
        batch_size=min(batch_size or _BATCH, len(texts)),
        recorder=recorder,
    )
    prompts = [_encode(tokenizer, text, chat) for text in texts]
    try:
        outcome = run(lm, tokenizer, prompts, settings)
    except (ValueError, TorchvmError) as error:
        raise CommandError(str(error)) from error
    if as_json:
        import json

        typer.echo(json.dumps(as_dict(outcome, listed=prompts_file is not None)))
    else:
        typer.echo(as_text(outcome, with_text=not stream))
    if record is not None and recorder is not None:
        header = Header(
            model=model,
            backend=outcome.backend,
            num_draft_tokens=num_draft_tokens,
            topk=topk,
            depth=depth,
            sampling=Sampling(temperature, top_p, top_k, seed) if temperature > 0 else None,
        )
        write_file(record, recorder.content(header))
    if check and not outcome.agrees:
        raise typer.Exit(1)


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise CommandError(f"PROMPT must be UTF-8 text, got {prompt!r}") from error
    return prompt


def _encode(tokenizer: Tokenizer, prompt: str, chat: bool | None) -> list[int]:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise CommandError("--chat needs a model with a chat template: use --raw")
    if chat is False or not has_template:
        return list(tokenizer(prompt).input_ids)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)
