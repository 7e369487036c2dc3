"""Decoding loops over compiled steps: speculative, and plain for comparison."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.backends.base import VerifyConfig
from torchvm.engine.batch import Batch
from torchvm.engine.drafts import HiddenDrafter, pack_drafts
from torchvm.engine.runner import VerifyRunner, checked_buckets
from torchvm.engine.steps import (
    RECOMPILE_LIMIT,
    compiled_step,
    plain_step,
    prefill,
    verify_step,
)
from torchvm.engine.target import HiddenTarget
from torchvm.engine.transformers_target import as_target
from torchvm.engine.verifier import start_verifier
from torchvm.ops.layout import TreeMaskMode, tree_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from torchvm.backends.base import AttentionBackend
    from torchvm.engine.drafts import Drafter
    from torchvm.engine.target import TargetCache, TargetModel
    from torchvm.sampling import SamplingParams

__all__ = ["Decoder", "Generation", "PlainDecoder", "SpeculativeDecoder"]


class Generation(NamedTuple):
    """What a run produced."""

    sequences: list[list[int]]
    """New tokens of each request, the end token included."""
    accepted: list[list[int]]
    """Tokens beyond the first that each step gave a request, for the steps it took part in."""
    steps: int
    """Forwards of the whole batch, prefill aside."""
    prefill_seconds: float
    decode_seconds: float
    """Drafting, forwards and cache compaction; compiles aside when warmed up before."""

    @property
    def accepted_per_step(self) -> float:
        """Mean number of drafts accepted in a step of a request, the bonus token not counted."""
        counts = [count for row in self.accepted for count in row]
        return sum(counts) / len(counts)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests by `decode_seconds`."""
        return sum(map(len, self.sequences)) / self.decode_seconds


class Decoder(ABC):
    """A model bound to a batch size and a context, whose step is compiled once.

    Args:
        model: a Llama-like causal LM of transformers in eval mode, or any `TargetModel`.
        batch_size: B, the most prompts of a run.
        max_context_len: most tokens of a request, prompt included.
        inner: what compiles the step, "inductor" or "aot_eager".

    Raises:
        ValueError: when the model trains, its positions end before `max_context_len`, or there is
            no request.
    """

    step: Callable[..., Any]
    num_tokens: int
    spare_slots = 0
    """Of the cache, beside one for each request."""
    _observer: HiddenDrafter | None = None
    """Who is given the target's states."""

    def __init__(
        self,
        model: PreTrainedModel | TargetModel,
        *,
        batch_size: int,
        max_context_len: int,
        inner: str,
    ) -> None:
        self.target = as_target(model)
        limit = self.target.max_position_embeddings
        if max_context_len > limit:
            raise ValueError(
                f"max_context_len must be at most the model's {limit}, got {max_context_len}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        self.batch_size = batch_size
        self.max_context_len = max_context_len
        self._compiled = compiled_step(type(self).step, inner)
        self._warm = False
        self._cache: TargetCache | None = None

    def warm_up(self) -> float:
        """Compile the step by running it once on nothing; return the seconds that took."""
        started = time.perf_counter()
        with torch.inference_mode(), self.target.attending():
            nothing = Batch(
                [[0]] * self.batch_size, max_new_tokens=1, eos_token_ids=(), max_context_len=2
            )
            self._advance(self._fresh_cache(), nothing)
        return time.perf_counter() - started

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: Collection[int] = (),
        on_step: Callable[[list[list[int]]], None] | None = None,
        stop_when: Callable[[int, Sequence[int]], bool] | None = None,
        first_request: int = 0,
    ) -> Generation:
        """Decode a batch.

        Args:
            prompts: 1 to `batch_size` lists of tokens; the rows of those that are missing idle.
            max_new_tokens: budget of each request.
            eos_token_ids: a request ends with the first of these.
            on_step: is given the new tokens of each request after every step.
            stop_when: is given a request's number and its new tokens, after each of them; True
                ends the request, which keeps the token.
            first_request: number of the first prompt, where this is a batch of many: requests of
                the same number and seed sample alike.

        Raises:
            ValueError: for no prompts or too many, or one that leaves no room for a token or has
                tokens that are not in the model's vocabulary.
            RuntimeError: when a step after the first would be compiled anew.
        """
        if not 1 <= len(prompts) <= self.batch_size:
            raise ValueError(f"prompts must be 1 to {self.batch_size}, got {len(prompts)}")
        _check_tokens(prompts, self.target.vocab_size)
        batch = Batch(
            prompts,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            max_context_len=self.max_context_len,
            stop_when=stop_when,
            idle=self.batch_size - len(prompts),
        )
        accepted: list[list[int]] = [[] for _ in prompts]
        steps = 0
        self._begin(first_request)
        with torch.inference_mode(), self.target.attending():
            started = time.perf_counter()
            cache = self._fresh_cache()
            prefill(self.target, cache, batch.sequences, self._observer)
            prefilled = time.perf_counter()
            while any(batch.active):
                found = self._advance(cache, batch)
                steps += 1
                appended = [batch.extend(b, found[b]) for b in range(len(prompts))]
                for row, tokens in zip(accepted, appended, strict=True):
                    row.extend([len(tokens) - 1] if tokens else [])
                if on_step:
                    on_step(appended)
            ended = time.perf_counter()
        return Generation(
            batch.new_tokens(), accepted, steps, prefilled - started, ended - prefilled
        )

    @abstractmethod
    def _begin(self, first_request: int) -> None:
        """Prepare for a run."""

    @abstractmethod
    def _advance(self, cache: TargetCache, batch: Batch) -> list[list[int]]:
        """Run one step; return what each active request is to append, [] for the others."""

    def _fresh_cache(self) -> TargetCache:
        """The decoder's cache, with nothing in it: one for all runs, at one address."""
        if self._cache is None:
            slots = self.batch_size + self.spare_slots
            self._cache = self.target.allocate(slots, self.max_context_len, self.num_tokens)
        else:
            self._cache.reset()
        return self._cache


class PlainDecoder(Decoder):
    """One token a step, with neither drafts nor mask."""

    step = plain_step
    num_tokens = 1
    last_logits: Tensor
    """(B, vocabulary) of the last step."""

    def _begin(self, first_request: int) -> None:
        """Do nothing: every run is greedy."""

    def _advance(self, cache: TargetCache, batch: Batch) -> list[list[int]]:
        device = self.target.device
        roots = torch.tensor([sequence[-1:] for sequence in batch.sequences], device=device)
        seq_lens = batch.seq_lens()
        slots = list(range(self.batch_size))
        with _one_compile(warm=self._warm):
            tokens, logits = self._compiled(
                self.target,
                cache,
                roots,
                torch.tensor(slots, device=device),
                torch.tensor(seq_lens, device=device),
            )
        self._warm = True
        cache.compact(slots, seq_lens, [()] * self.batch_size)
        self.last_logits = logits[:, -1]
        return [row if on else [] for row, on in zip(tokens.tolist(), batch.active, strict=True)]


class SpeculativeDecoder(Decoder):
    """Verifies a drafted tree a step.

    Args:
        model: see `Decoder`.
        drafter: proposes the trees; its `num_draft_tokens` and `topk` shape the step,
            which gives the target's states to a `HiddenDrafter` and to no other.
        batch_size: see `Decoder`.
        max_context_len: see `Decoder`.
        inner: see `Decoder`.
        mask_mode: the layout that a mask is declared in that the compiled step allocates.
        backend: name of an attention back end, or what makes one from a config. It owns the mask,
            in the layout that a plan of the step finds. None verifies with "cpu" and a mask that
            the step allocates itself.
        buckets: batch sizes that the step is compiled, or captured, for; the requests that still
            decode run on the smallest that holds them, and eagerly, on a mask of their own, where
            none does. By default `batch_size` alone.
        sampling: how tokens are sampled; None decodes greedily. In every run a request's samples
            follow from the seed and its number, and from no other request.

    Raises:
        MaskContractError: when the back end declares a mask unread that its kernels read.
        TypeError: for a `HiddenDrafter` with a model that is no `HiddenTarget`.
        ValueError: for an unknown back end, or one that cannot verify this model or `topk`, for
            buckets or a drafter made for other sizes, and for a `HiddenDrafter` that reads states
            of another size.
    """

    step = verify_step
    spare_slots = 1

    def __init__(
        self,
        model: PreTrainedModel | TargetModel,
        drafter: Drafter,
        *,
        batch_size: int,
        max_context_len: int,
        inner: str = "inductor",
        mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK,
        backend: str | Callable[[VerifyConfig], AttentionBackend] | None = None,
        buckets: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        super().__init__(
            model, batch_size=batch_size, max_context_len=max_context_len, inner=inner
        )
        self.drafter = drafter
        _check_drafter(drafter, batch_size, max_context_len)
        if isinstance(drafter, HiddenDrafter):
            _check_states(self.target, drafter)
            self._observer = drafter
        self.num_tokens = drafter.num_draft_tokens
        buckets = checked_buckets(buckets, batch_size)
        self.verifier = start_verifier(
            self.target,
            backend,
            config=VerifyConfig(
                num_draft_tokens=drafter.num_draft_tokens,
                max_context_len=max_context_len,
                topk=drafter.topk,
                device=self.target.device,
            ),
            max_bs=buckets[-1],
            mask_mode=tree_mode(mask_mode),
            sampling=sampling,
            hidden_states=self._observer is not None,
        )

        self.runner = VerifyRunner(
            self.target, self.verifier, self._compiled, max_bs=batch_size, buckets=buckets
        )

    def _begin(self, first_request: int) -> None:
        """Sample every run from the same seed."""
        self.runner.seed(first_request)

    def warm_up(self) -> float:
        """Compile, and on CUDA capture, every bucket; return the seconds that took."""
        started = time.perf_counter()
        with torch.inference_mode(), self.target.attending():
            self.runner.bind(self._fresh_cache())
            self.runner.warmup()
        return time.perf_counter() - started

    def _advance(self, cache: TargetCache, batch: Batch) -> list[list[int]]:
        slots = [b for b, on in enumerate(batch.active) if on]
        drafts = self.drafter.propose(batch.sequences, batch.active)
        tokens, parents = pack_drafts(
            drafts,
            batch.sequences,
            batch.active,
            num_draft_tokens=self.num_tokens,
            topk=self.drafter.topk,
            vocab_size=self.target.vocab_size,
        )
        lengths = batch.seq_lens()
        seq_lens = [lengths[b] for b in slots]
        self.runner.bind(cache)
        verified = self.runner.run(
            tokens[slots].tolist(), parents[slots].tolist(), seq_lens, slots
        )
        cache.compact(slots, seq_lens, verified.paths)
        if self._observer is not None:
            assert verified.hidden is not None
            nodes = [[0, *path] for path in verified.paths]
            self._observer.observe(verified.hidden, requests=slots, starts=seq_lens, nodes=nodes)
        found: list[list[int]] = [[] for _ in batch.active]
        for b, row in zip(slots, verified.tokens, strict=True):
            found[b] = row
        return found


def _check_tokens(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Require tokens that have an embedding; on CUDA others are a fault of the device."""
    for b, prompt in enumerate(prompts):
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise ValueError(f"tokens of prompt {b} must be in [0, {vocab_size}), got {token}")


def _check_drafter(drafter: Drafter, batch_size: int, max_context_len: int) -> None:
    """Require a drafter that was made for these batches, where it was made for any."""
    requests = getattr(drafter, "batch_size", batch_size)
    if requests != batch_size:
        raise ValueError(
            f"drafter must be made for batch_size {batch_size}, got one for {requests}"
        )
    context = getattr(drafter, "max_context_len", max_context_len)
    if context < max_context_len:
        raise ValueError(
            f"drafter must be made for max_context_len {max_context_len} or more, got {context}"
        )


def _check_states(target: TargetModel, drafter: HiddenDrafter) -> None:
    """Require a target that gives its states, in the size that the drafter reads."""
    if not isinstance(target, HiddenTarget):
        raise TypeError(
            f"model must be a HiddenTarget for {type(drafter).__name__}, which reads its states, "
            f"got {type(target).__name__}"
        )
    if drafter.hidden_size != target.hidden_size:
        raise ValueError(
            f"drafter must read states of the model's hidden size {target.hidden_size}, "
            f"got {drafter.hidden_size}"
        )


@contextmanager
def _one_compile(*, warm: bool) -> Iterator[None]:
    """Allow a compile, or fail on one."""
    if warm:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    else:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            yield
