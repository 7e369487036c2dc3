"""torch.compile with mask layouts derived from the graph: a backend, or options for Inductor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from torch._dynamo.backends.registry import register_backend

from torchvm.passes.base import ChainedPasses, MaskPass
from torchvm.passes.causal_chains import CausalChains
from torchvm.passes.clone_check import verify_no_clone
from torchvm.passes.compact_tree_block_readers import CompactTreeBlockReaders
from torchvm.passes.elide_unread_masks import ElideUnreadMasks
from torchvm.passes.graph import graph_modules
from torchvm.passes.hoist_mask_readers import HoistMaskReaders
from torchvm.passes.keep_copies import KeepCopies
from torchvm.passes.skip_prefix_fill import SkipPrefixFill
from torchvm.passes.visibility import VisiblePipeline, announce
from torchvm.report_cache import load_reports, report_key, save_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import Graph, GraphModule

    from torchvm.passes.report import MaskReport

__all__ = [
    "PASSES",
    "PASS_NAMES",
    "clear_reports",
    "inductor_options",
    "recording_pipeline",
    "reports",
    "torchvm_backend",
]

PASSES: tuple[type[MaskPass], ...] = (
    CausalChains,
    ElideUnreadMasks,
    CompactTreeBlockReaders,
    SkipPrefixFill,
)
"""Every mask pass, in the order in which they try a mask."""

PASS_NAMES = (*(p.__name__ for p in PASSES), KeepCopies.__name__, HoistMaskReaders.__name__)
"""What `passes` may name. The last two keep copies and order the graph, and rewrite no mask."""

_MASK_HOOK = "joint_custom_pre_pass"
_ORDER_HOOK = "post_grad_custom_pre_pass"
_OWN_OPTIONS = ("inner", "passes")
_reports: list[MaskReport] = []


def reports() -> tuple[MaskReport, ...]:
    """Return what happened to every mask compiled in this process, oldest first.

    With `backend="torchvm"` a graph that comes out of a compile cache reports as it did when it
    was compiled. With `inductor_options` alone nothing of torchvm runs on a cache hit.
    """
    return tuple(_reports)


def clear_reports() -> None:
    """Forget the reports so far."""
    _reports.clear()


def inductor_options(
    *, passes: Sequence[str] | None = None, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options that make Inductor lay masks out by the graph: `torch.compile(f, options=...)`.

    Args:
        passes: names of the passes to run, out of `PASS_NAMES`; all by default. Their order is
            fixed.
        options: Inductor options of your own, kept. A pass in a hook that torchvm uses too, here
            or in Inductor's global config, runs before torchvm's.

    Raises:
        ValueError: when a name in `passes` is not that of a pass.
    """
    return _with_passes(recording_pipeline(passes), _checked(passes), options or {})


def recording_pipeline(passes: Sequence[str] | None = None) -> VisiblePipeline:
    """Make the mask passes, as one graph pass whose reports `reports()` returns.

    Args:
        passes: as in `inductor_options`.

    Raises:
        ValueError: when a name in `passes` is not that of a pass.
    """
    return _pipeline(_checked(passes), _reports.extend)


def torchvm_backend(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: the backend of `torch.compile(f, backend="torchvm")`.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its (fake) inputs.
        mode: an Inductor mode, as in `torch.compile(mode=...)`.
        options: `inner` ("inductor", the default, or "aot_eager": the rewritten graph runs op by
            op) and `passes` (names, see `inductor_options`) are torchvm's; any other goes to
            Inductor.

    Raises:
        ValueError: for an unknown option, inner compiler or pass, or for Inductor options or a
            mode with `inner="aot_eager"`.
    """
    rest = dict(options or {})
    inner = rest.pop("inner", "inductor")
    names = _checked(rest.pop("passes", None))
    if inner == "aot_eager":
        _refuse_inductor_settings(mode, rest)
        found: list[MaskReport] = []
        compiled = _compile_aot_eager(gm, example_inputs, _pipeline(names, found.extend))
        _reports.extend(found)
        return compiled
    if inner != "inductor":
        raise ValueError(f'option inner must be "inductor" or "aot_eager", got {inner!r}')
    return _compile_inductor(gm, example_inputs, names, _inductor_settings(mode, rest))


def _checked(names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return PASS_NAMES
    if isinstance(names, str) or any(name not in PASS_NAMES for name in names):
        raise ValueError(f"passes must be a list of names out of {PASS_NAMES}, got {names!r}")
    return tuple(name for name in PASS_NAMES if name in names)


def _pipeline(names: tuple[str, ...], sink: Callable[[list[MaskReport]], None]) -> VisiblePipeline:
    return VisiblePipeline([p() for p in PASSES if p.__name__ in names], sink)


def _with_passes(
    pipeline: VisiblePipeline, names: tuple[str, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Put torchvm's passes into their hooks, behind the caller's own."""
    added: dict[str, Callable[[Graph], None]] = {_MASK_HOOK: pipeline}
    if KeepCopies.__name__ in names:
        added[_MASK_HOOK] = ChainedPasses([pipeline, KeepCopies()])
    if HoistMaskReaders.__name__ in names:
        added[_ORDER_HOOK] = HoistMaskReaders()
    return {**options, **{hook: _chained(hook, p, options) for hook, p in added.items()}}


def _chained(
    hook: str, graph_pass: Callable[[Graph], None], options: Mapping[str, Any]
) -> Callable[[Graph], None]:
    from torch._inductor import config

    theirs = options.get(hook, getattr(config, hook))
    if not theirs:
        return graph_pass
    chain = theirs if isinstance(theirs, list | tuple) else [theirs]
    return ChainedPasses([*chain, graph_pass])


def _refuse_inductor_settings(mode: str | None, options: Mapping[str, Any]) -> None:
    if mode not in (None, "default"):
        raise ValueError(f'mode must be left out with inner="aot_eager", got {mode!r}')
    if options:
        known = ", ".join(_OWN_OPTIONS)
        raise ValueError(f'options must be {known} with inner="aot_eager", got {sorted(options)}')


def _inductor_settings(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a mode and options for Inductor, refusing what it does not know."""
    from torch._inductor import config, list_mode_options

    known = config.get_config_copy()
    settings = {name.replace("-", "_"): value for name, value in options.items()}
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"options must be {', '.join(_OWN_OPTIONS)} or options of Inductor, got {unknown}"
        )
    if mode in (None, "default"):
        return settings
    return {**list_mode_options(mode), **settings}


def _compile_inductor(
    gm: GraphModule,
    example_inputs: list[Any],
    names: tuple[str, ...],
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    run = _Run(names)
    settings = _with_passes(run.pipeline, names, options)
    key = report_key(gm, example_inputs, run.pipeline.uuid(), names)

    def compile_graph() -> Any:
        return compile_fx(
            gm, example_inputs, inner_compile=run.compile_and_check, config_patches=settings
        )

    compiled = compile_graph()
    found = run.reports() if run.passes_ran else load_reports(key)
    if found is None:
        # The artifact is cached and its reports are not: only compiling again tells.
        with (
            inductor_config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            compiled = compile_graph()
        found = run.reports()
    if run.passes_ran:
        save_reports(key, found)
    else:
        announce(found)
    _reports.extend(found)
    return cast("Callable[..., Any]", compiled)


class _Run:
    """One run of Inductor over a graph: what the passes reported and which masks are copied."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.passes_ran = False
        self.pipeline = _pipeline(names, self._take)
        self._found: list[MaskReport] = []
        self._copied: set[str] = set()

    def _take(self, reports: list[MaskReport]) -> None:
        self.passes_ran = True
        self._found.extend(reports)

    def compile_and_check(self, gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Compile as Inductor does, then look at the final graph that it leaves in `gm`."""
        from torch._inductor.compile_fx import compile_fx_inner

        compiled = compile_fx_inner(gm, *args, **kwargs)
        self._copied.update(copy.copied for copy in verify_no_clone(gm.graph))
        return compiled

    def reports(self) -> list[MaskReport]:
        """Return the reports, completed by what the final graph copies."""
        return [
            msgspec.structs.replace(report, copied=report.name in self._copied)
            for report in self._found
        ]


def _compile_aot_eager(
    gm: GraphModule, example_inputs: list[Any], pipeline: VisiblePipeline
) -> Callable[..., Any]:
    """Rewrite the functional graph and run it op by op."""
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop

    def rewrite_then_run(graph_module: GraphModule, inputs: list[Any]) -> Any:
        for module in graph_modules(graph_module):
            pipeline(module.graph)
            module.recompile()
        return boxed_nop(graph_module, inputs)

    return aot_eager(gm, example_inputs, fw_compiler=rewrite_then_run)


def _register_backend() -> None:
    """Register the name where no installed entry point does so already."""
    from importlib.metadata import entry_points

    if not entry_points(group="torch_dynamo_backends", name="torchvm"):
        register_backend(torchvm_backend, name="torchvm")


_register_backend()
