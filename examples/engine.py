"""A small engine of continuous batching: requests come and go, and each step serves what is there.

    engine = Engine(model, num_pages=1024)
    number = engine.submit(prompt, max_new_tokens=100)
    for token in engine.stream(number): ...

A step runs the model once on packed tokens: the newest token of every sequence that is generating,
then as much of the waiting prompts as `max_tokens_per_step` leaves room for. Attention of all of
them is one call of `flash_pallas.ragged_paged_attention` in each layer, and the number of tokens is
padded to one of a few sizes, so that a handful of programs serves every mix. Where sequences that
are generating begin with the same pages, as with a common system prompt, another program of the
same size reads those pages once for all of them.

In this order below: a request, what the device computes, the engine. pages.py has the pages that
requests hold, serve.py a load of simulated requests.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from model import VOCABULARY, Transformer
from pages import PagePool, extend_names

from flash_pallas import explain, ragged_paged_attention

# Padded number of tokens; the others are 4, 16, ... times as many. Each of them is compiled, and a
# step of few tokens takes the time of reading the parameters, however many of them are padding.
SMALLEST_STEP = 16


@dataclasses.dataclass(eq=False)
class Request:
    """A request and how far it is.

    Attributes:
        id: number that `Engine.submit` returned; older requests have smaller ones.
        tokens: int32 [prompt + max_new_tokens], the prompt and what has been generated. A token
            that the host has not read yet is -1 - its row in the step that samples it.
        prompt: number of tokens of the prompt.
        length: number of tokens so far, the one that has not been read included.
        temperature: 0 takes the most likely token.
        seed: seed of the random numbers.
        stop: tokens that end the request.
        pages: pages that it holds, in the order of its tokens.
        computed: number of tokens whose keys and values those have, in steps launched so far.
        names: names of its first full pages; see pages.py.
        state: "waiting", "running", or how it ended: "length", "stop" or "cancelled".
        times: when it was submitted, and when each new token was read, in seconds.
        preemptions: how often its pages were taken away.
    """

    id: int
    tokens: np.ndarray
    prompt: int
    length: int
    temperature: float
    seed: int
    stop: frozenset[int]
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    names: list[bytes] = dataclasses.field(default_factory=list)
    state: str = "waiting"
    times: list[float] = dataclasses.field(default_factory=list)
    preemptions: int = 0

    @property
    def known(self) -> int:
        """Number of tokens that the host knows."""
        return self.prompt + len(self.times) - 1

    @property
    def missing(self) -> int:
        """Number of tokens whose keys and values are yet to be computed; the last has no use."""
        return min(self.length, len(self.tokens) - 1) - self.computed

    @property
    def new_tokens(self) -> list[int]:
        """Tokens that have been generated and read."""
        return self.tokens[self.prompt : self.known].tolist()

    @property
    def finished(self) -> bool:
        """True once no token will be added."""
        return self.state not in ("waiting", "running")


# What the device computes.


class Batch(NamedTuple):
    """Input of one step, views of one int32 array: the host sends it in one transfer.

    Attributes:
        tokens: int32 [tokens], those of all sequences one after the other; -1 - r is what the step
            before sampled in row r.
        counts: int32 [max_seqs], number of these tokens of each sequence, 0 for none.
        lengths: int32 [max_seqs], number of its keys after the step.
        seeds: int32 [max_seqs].
        temperatures: int32 [max_seqs], the bits of float32 numbers.
        page_table: int32 [max_seqs, max_pages].
    """

    tokens: Any
    counts: Any
    lengths: Any
    seeds: Any
    temperatures: Any
    page_table: Any

    @classmethod
    def views(cls, sheet, max_seqs: int, max_pages: int) -> Batch:
        """Makes the views, on the host (numpy) or on the device.

        Args:
            sheet: int32 [tokens + max_seqs * (4 + max_pages)].
            max_seqs: number of sequences that there is room for.
            max_pages: number of pages of a sequence that there is room for.
        """
        size = len(sheet) - max_seqs * (4 + max_pages)
        rows = sheet[size:].reshape(4 + max_pages, max_seqs)
        return cls(sheet[:size], *rows[:4], page_table=rows[4:].T)


def saved_keys(batch: Batch, page_size: int) -> int:
    """Counts the keys that steps need not read if they read common leading pages once.

    The device finds the same groups: sequences with one first page share what all of them have.

    Args:
        batch: a batch, on the host.
        page_size: number of tokens of a page.
    """
    # The page of the new token is not full, or will be only now.
    full = (batch.lengths - 1) // page_size
    steps = (batch.counts == 1) & (full > 0)
    if np.count_nonzero(steps) < 2:
        return 0
    table = batch.page_table[steps]
    _, leaders, group = np.unique(table[:, 0], return_index=True, return_inverse=True)
    equal = np.cumprod(table == table[leaders[group]], axis=1).sum(axis=1)
    common = np.full(len(leaders), table.shape[1])
    np.minimum.at(common, group, np.minimum(equal, full[steps]))
    return page_size * int(((np.bincount(group) - 1) * common).sum())


def saves_half(batch: Batch, page_size: int) -> bool:
    """Returns whether steps read at most half as much if they read common leading pages once.

    A call that looks for such pages takes more launches, so it has to save more than a little.
    """
    read = int(batch.lengths[batch.counts == 1].sum())
    return 0 < read <= 2 * saved_keys(batch, page_size)


def model_step(structure, shape: tuple[int, int], shares: bool, leaves, pages, sampled, sheet):
    """Appends the tokens of a batch to the cache and samples the next token of each sequence.

    Args:
        structure: graph of the model and structure of its parameters; see `Engine`.
        shape: (max_seqs, max_pages).
        shares: leading pages that several steps have in common are read once.
        leaves: parameters, as `jax.tree.leaves` lists them.
        pages: pair (k, v) of each layer, [num_pages, page_size, kv_heads, head_dim].
        sampled: int32 [max_seqs], what the step before returned.
        sheet: int32, the batch; see `Batch.views`.

    Returns:
        The pages, and int32 [max_seqs]: for each sequence the token after its last one. It means
        nothing for sequences without tokens in this batch, or with a part of a prompt.
    """
    graph, tree = structure
    model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    batch = Batch.views(sheet, *shape)
    ends = jnp.cumsum(batch.counts, dtype=jnp.int32)
    row = jnp.arange(len(batch.tokens), dtype=jnp.int32)
    # Rows of padding count as the last sequence's here; attention neither stores nor reads them.
    seq = jnp.minimum(jnp.searchsorted(ends, row, side="right"), shape[0] - 1)
    positions = jnp.maximum(batch.lengths[seq] - ends[seq] + row, 0)
    before = sampled[jnp.clip(-1 - batch.tokens, 0, shape[0] - 1)]
    x = model.embed(jnp.where(batch.tokens < 0, before, batch.tokens))[None]
    pages = list(pages)

    def attention(layer, q, k, v, *, scale, backend, **_):
        """Computes attention of all tokens [1, tokens, heads, head_dim] to the pages."""
        k_pages, v_pages = pages[layer]
        o, pages[layer] = ragged_paged_attention(
            q[0],
            k_pages,
            v_pages,
            new_k=k[0],
            new_v=v[0],
            kv_lengths=batch.lengths,
            page_table=batch.page_table,
            cu_q_lens=jnp.concatenate([jnp.zeros_like(ends[:1]), ends]),
            scale=scale,
            shared_prefix="auto" if shares else None,
            backend=backend,
        )
        return o[None]

    for layer, block in enumerate(model.blocks):
        block.attention.attention = functools.partial(attention, layer)
        x = block(x, positions=positions)
    last = x[0, jnp.maximum(ends - 1, 0)]
    logits = model.logits(model.norm(last)).astype(jnp.float32)
    temperatures = jax.lax.bitcast_convert_type(batch.temperatures, jnp.float32)
    return pages, jax.vmap(sample)(logits, batch.seeds, batch.lengths, temperatures)


@functools.cache
def compiled(structure, shape: tuple[int, int], shares: bool):
    """Returns `model_step` of these under jit, which takes over the buffers of the pages.

    They are bound here since hashing the graph of a model in every call takes 1.4 ms at 12 layers.
    """
    return jax.jit(functools.partial(model_step, structure, shape, shares), donate_argnums=1)


def noise(seed, position) -> jax.Array:
    """Returns the Gumbel noise float32 [VOCABULARY] of one token of one request.

    It depends on the request's seed and on the position alone, not on what else is in a batch.
    """
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (VOCABULARY,), jnp.float32)


def sample(logits, seed, position, temperature) -> jax.Array:
    """Samples a token by the Gumbel-max trick; temperature 0 takes the most likely one."""
    return jnp.argmax(logits + temperature * noise(seed, position)).astype(jnp.int32)


class Flight(NamedTuple):
    """A step whose tokens have not been read.

    Attributes:
        sampled: int32 [max_seqs], on the device.
        rows: its (row, request, index of the token in request.tokens).
    """

    sampled: Any
    rows: list[tuple[int, Request, int]]


class Engine:
    """Serves requests on one device; see the module.

    Every call of `step` launches a step and then reads the tokens of the one before, while the
    device computes. A sequence that a stop token or `cancel` ends may so have one token computed
    that nobody reads.

    Requests are admitted in the order in which they come. Where a sequence needs a page and none is
    left, the youngest running request is preempted: it gives back its pages and waits. Later it
    goes on from the tokens that it has, whose keys are computed again where their pages are lost.

    Attributes:
        model: the model.
        requests: all requests by their ids, also those that have ended, until `forget`.
        pool: pages and who holds them.
        token_sizes: padded numbers of tokens, for each of which the programs are compiled.
        steps: number of steps launched.
        shared_steps: number of those that read common leading pages once.
        programs: `model_step` by `shares`, of which True is missing without share_prefixes.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_pages: int,
        page_size: int = 64,
        max_context: int = 2048,
        max_seqs: int = 64,
        max_tokens_per_step: int = 512,
        share_prefixes: bool = True,
        batch_by_batch: bool = False,
    ):
        """Makes an engine with an empty cache.

        Args:
            model: the model; its attention layers say which backend runs.
            num_pages: number of pages of the cache, which all sequences share.
            page_size: number of tokens of a page, a multiple of 16 up to 256.
            max_context: most tokens of a sequence, prompt and answer.
            max_seqs: most sequences of a step.
            max_tokens_per_step: most tokens of a step, at least max_seqs, so that every sequence
                gets its token. More of them serve prompts faster, and delay the tokens of others.
            share_prefixes: let requests that begin with the same full pages share them; a step
                reads them once for all sequences where that saves half of what it reads.
            batch_by_batch: serve as without continuous batching, to compare with it: requests join
                a batch until one of it ends, and the next batch begins when all have.

        Raises:
            ValueError: max_tokens_per_step is less than max_seqs.
        """
        if max_tokens_per_step < max_seqs:
            raise ValueError(
                f"max_tokens_per_step is {max_tokens_per_step} and max_seqs {max_seqs}: every "
                "sequence needs a token of a step. Raise the former or lower the latter"
            )
        self.model, self.pool = model, PagePool(num_pages, page_size)
        self.max_seqs, self.share_prefixes = max_seqs, share_prefixes
        self.batch_by_batch, self._closed = batch_by_batch, False
        self.max_pages = min(-(-max_context // page_size), num_pages)
        self.max_context = min(max_context, self.max_pages * page_size)
        self.token_sizes = [min(SMALLEST_STEP, max_tokens_per_step)]
        while self.token_sizes[-1] < max_tokens_per_step:
            self.token_sizes.append(min(4 * self.token_sizes[-1], max_tokens_per_step))
        self.requests: dict[int, Request] = {}
        self.steps = self.shared_steps = 0
        self._prompt_tokens = self._reused_tokens = 0  # of requests that have been admitted
        self._ids = itertools.count()
        self._waiting: collections.deque[Request] = collections.deque()  # oldest first, as running
        self._running: list[Request] = []
        graph, params = nnx.split(model)
        # A state of nnx is flattened by Python code, 0.2 ms in every step; a list of arrays is not.
        self._leaves, tree = jax.tree.flatten(params)
        shape = (num_pages, page_size, *model.cache_sizes[:2])
        zeros = lambda: jnp.zeros(shape, model.cache_sizes[2])
        self._pages = [(zeros(), zeros()) for _ in model.blocks]
        self._shape = max_seqs, self.max_pages
        choices = (False, True) if share_prefixes else (False,)
        self.programs = {x: compiled((graph, tree), self._shape, x) for x in choices}
        self._warm: dict[tuple[int, bool], Any] = {}  # by size of the sheet and `shares`
        self._flight = Flight(jnp.zeros(max_seqs, jnp.int32), [])

    def submit(
        self,
        prompt: Sequence[int] | np.ndarray,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[int] = (),
    ) -> int:
        """Puts a request at the end of the queue and returns its id.

        Args:
            prompt: tokens, at least one.
            max_new_tokens: number of tokens to generate, unless a stop token comes first.
            temperature: 0 takes the most likely token each time; 1 samples as the model says.
            seed: seed of the random numbers; results do not depend on other requests.
            stop: tokens that end the answer, as its last one.

        Raises:
            ValueError: a token that the model does not know, an empty prompt or answer, a negative
                temperature, a seed that is no int32, or a request that could never fit.
        """
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or not len(prompt) or not np.issubdtype(prompt.dtype, np.integer):
            raise ValueError(
                f"prompt has shape {prompt.shape} and dtype {prompt.dtype}: it must be integers "
                "[length], at least one"
            )
        if prompt.min() < 0 or prompt.max() >= VOCABULARY:
            raise ValueError(
                f"prompt has tokens from {prompt.min()} to {prompt.max()}: they must be in "
                f"[0, {VOCABULARY})"
            )
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        if not 0 <= temperature < np.inf:
            raise ValueError(f"temperature is {temperature}: it must be 0 or positive")
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed is {seed}: it must be in [0, 2**31), as it is sent as int32")
        total = len(prompt) + max_new_tokens
        if total > self.max_context:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, {total} "
                f"together: a sequence has room for {self.max_context} (max_context, and "
                f"{self.pool.num_pages} pages of {self.pool.page_size}). Shorten the prompt, lower "
                "max_new_tokens, or make the engine with more"
            )
        tokens = np.zeros(total, np.int32)
        tokens[: len(prompt)] = prompt
        request = Request(
            next(self._ids), tokens, len(prompt), len(prompt), temperature, seed, frozenset(stop)
        )
        request.times.append(time.perf_counter())
        self.requests[request.id] = request
        self._waiting.append(request)
        return request.id

    def cancel(self, number: int) -> bool:
        """Ends a request and gives back its pages; returns False if it has ended before."""
        request = self._request(number)
        if not request.finished:
            self._end(request, "cancelled")
        return request.state == "cancelled"

    def forget(self, number: int) -> None:
        """Drops a request that has ended, and its tokens.

        Raises:
            ValueError: it has not ended.
        """
        if not self._request(number).finished:
            raise ValueError(f"request {number} has not ended: cancel it first")
        del self.requests[number]

    def stream(self, number: int) -> Iterator[int]:
        """Yields the tokens of a request, and steps the engine while there is none.

        Several streams may take turns, as each step serves all requests.
        """
        request, sent = self._request(number), 0
        while True:
            new = request.new_tokens[sent:]
            yield from new
            sent += len(new)
            if not new:
                if request.finished:
                    return
                self.step()

    @property
    def idle(self) -> bool:
        """True if no request waits or runs and no step is to be read."""
        return not (self._waiting or self._running or self._flight.rows)

    def step(self) -> list[tuple[int, int, bool]]:
        """Launches a step and reads the one before.

        Returns:
            (request, token, whether the request has ended) for each token that was read, none in
            the first step. A request that is cancelled is not in it.
        """
        before = self._flight
        self._flight = self._launch(self._plan())
        return self._read(before)

    def warm_up(self) -> None:
        """Compiles the programs of all padded sizes, which the first requests need not wait for.

        XLA compiles them side by side, and each runs once on an empty batch.
        """
        sheets = {size: np.zeros(self._sheet_size(size), np.int32) for size in self.token_sizes}
        state = self._leaves, self._pages, self._flight.sampled
        keys = list(itertools.product(sheets, self.programs))
        lowered = [self.programs[shares].lower(*state, sheets[size]) for size, shares in keys]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            programs = threads.map(lambda program: program.compile(), lowered)
            for (size, shares), program in zip(keys, programs, strict=True):
                self._warm[len(sheets[size]), shares] = program
        for size, shares in keys:
            sampled = self._call(sheets[size], shares)
        sampled.block_until_ready()

    def _request(self, number: int) -> Request:
        if number not in self.requests:
            raise ValueError(f"no request has the id {number}: pass what submit returned")
        return self.requests[number]

    # Which requests run.

    def _plan(self) -> list[tuple[Request, int]]:
        """Chooses the requests of the next step, and how many tokens of each; takes their pages.

        Tokens of sequences that generate come first, as max_seqs of them fit in any case; then
        prompts, those begun before those that wait. Both queues are in the order of arrival, and
        only the head of the queue is admitted, so that a long request is not passed by short ones.
        """
        plan = []
        self._closed &= bool(self._running)
        for request in list(self._running):
            # One of those after the first may have been preempted for those before it.
            if request.state == "running" and request.missing == 1 and self._make_room(request):
                plan.append((request, 1))
        room = self.token_sizes[-1] - len(plan)
        prompts = [request for request in self._running if request.missing > 1]
        while room:
            request = prompts.pop(0) if prompts else self._admit()
            if request is None:
                break
            count = min(request.missing, room)
            plan.append((request, count))
            room -= count
            # Another request may share these pages in this very step: in each layer all keys are
            # written before any is read.
            full = (request.computed + count) // self.pool.page_size
            self.pool.name(request.pages[:full], request.names)
        return plan

    def _admit(self) -> Request | None:
        """Makes the request that waits longest a running one; None where it has to wait."""
        if not self._waiting or len(self._running) == self.max_seqs or self._closed:
            return None
        request, size = self._waiting[0], self.pool.page_size
        if self.share_prefixes:
            # Without the last token. It is computed in any case, as the next one is sampled from
            # its row, and that of a request that was preempted may not have been read.
            extend_names(request.names, request.tokens[: request.length - 1], size)
        pages = self.pool.share(request.names)
        more = -(-request.length // size) - len(pages)
        # A page stays for each running sequence. Otherwise requests would be admitted only to be
        # preempted a few tokens later.
        if more + len(self._running) > self.pool.available:
            self.pool.release(pages)
            return None
        request.pages = pages + self.pool.take(more)
        request.computed = len(pages) * size
        if not request.preemptions:
            self._prompt_tokens += request.prompt
            self._reused_tokens += request.computed
        request.state = "running"
        self._running.append(self._waiting.popleft())
        return request

    def _make_room(self, request: Request) -> bool:
        """Takes a page if the next token needs one; returns False if that preempts the request."""
        while request.computed == len(request.pages) * self.pool.page_size:
            if self.pool.available:
                request.pages += self.pool.take(1)
                continue
            youngest = self._running.pop()
            self._release(youngest)
            youngest.state = "waiting"
            youngest.preemptions += 1
            self._waiting.appendleft(youngest)
            if youngest is request:
                return False
        return True

    def _end(self, request: Request, state: str) -> None:
        self._closed |= self.batch_by_batch and request.state == "running"
        (self._running if request.state == "running" else self._waiting).remove(request)
        self._release(request)
        request.state = state

    def _release(self, request: Request) -> None:
        """Gives back the pages of a request, the full ones with names."""
        if self.share_prefixes:
            # What has not been read from the device has not been computed with either.
            extend_names(request.names, request.tokens[: request.computed], self.pool.page_size)
            full = request.computed // self.pool.page_size
            self.pool.name(request.pages[:full], request.names)
        self.pool.release(request.pages)
        request.pages, request.computed = [], 0

    # Steps, sent and read.

    def _launch(self, plan: list[tuple[Request, int]]) -> Flight:
        """Sends a batch to the device, and returns without waiting for what it computes."""
        if not plan:
            return Flight(self._flight.sampled, [])
        total = sum(count for _, count in plan)
        size = next(size for size in self.token_sizes if size >= total)
        sheet = np.zeros(self._sheet_size(size), np.int32)
        batch = Batch.views(sheet, *self._shape)
        temperatures = batch.temperatures.view(np.float32)
        rows, start = [], 0
        for row, (request, count) in enumerate(plan):
            first, end = request.computed, request.computed + count
            batch.tokens[start : start + count] = request.tokens[first:end]
            batch.counts[row], batch.lengths[row] = count, end
            batch.seeds[row], temperatures[row] = request.seed, request.temperature
            batch.page_table[row, : len(request.pages)] = request.pages
            request.computed = end
            start += count
            if end == request.length:
                request.tokens[end] = -1 - row
                request.length += 1
                rows.append((row, request, end))
        self.steps += 1
        return Flight(self._run(sheet), rows)

    def _sheet_size(self, tokens: int) -> int:
        return tokens + self.max_seqs * (4 + self.max_pages)

    def _run(self, sheet: np.ndarray) -> jax.Array:
        batch = Batch.views(sheet, *self._shape)
        shares = self.share_prefixes and saves_half(batch, self.pool.page_size)
        self.shared_steps += shares
        return self._call(sheet, shares)

    def _call(self, sheet: np.ndarray, shares: bool) -> jax.Array:
        program = self._warm.get((len(sheet), shares), self.programs[shares])
        before = self._flight.sampled
        self._pages, sampled = program(self._leaves, self._pages, before, sheet)
        sampled.copy_to_host_async()
        return sampled

    def _read(self, flight: Flight) -> list[tuple[int, int, bool]]:
        """Waits for the tokens of a step and hands them to their requests."""
        events, values = [], np.asarray(flight.sampled).tolist() if flight.rows else []
        now = time.perf_counter()
        for row, request, index in flight.rows:
            if request.finished:
                continue
            token = request.tokens[index] = values[row]
            request.times.append(now)
            if token in request.stop:
                self._end(request, "stop")
            elif index + 1 == len(request.tokens):
                self._end(request, "length")
            events.append((request.id, token, request.finished))
        return events

    # What an operator asks.

    def explain(self):
        """Returns which backend computes attention in a step of the largest size, and its tiles."""
        attention, pages = self.model.blocks[0].attention, self._pages[0]
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        shape = (self.token_sizes[-1], attention.num_heads, pages[0].shape[-1])
        return explain(
            ragged_paged_attention,
            jax.ShapeDtypeStruct(shape, pages[0].dtype),
            *pages,
            kv_lengths=ints(self.max_seqs),
            page_table=ints(self.max_seqs, self.max_pages),
            cu_q_lens=ints(self.max_seqs + 1),
            backend=attention.backend,
        )

    def check(self) -> None:
        """Checks that every page and every unfinished request is where it belongs.

        Raises:
            RuntimeError: one is not, or is in two places.
        """
        self.pool.check([request.pages for request in self.requests.values()])
        for state, queue in (("waiting", self._waiting), ("running", self._running)):
            wanted = [x.id for x in self.requests.values() if x.state == state]
            found = [request.id for request in queue]
            if found != wanted:
                raise RuntimeError(f"requests {wanted} are {state}, and {found} in the queue")

    def statistics(self) -> dict[str, float]:
        """Returns numbers of all requests that have not been forgotten.

        Times are in seconds, to a request's first token (ttft) and from each token to the next
        (tpot, a request's mean), at percentiles 50, 90 and 99; NaN where there is none.
        """
        requests = list(self.requests.values())
        times = [time for request in requests for time in request.times]
        new = sum(len(request.times) - 1 for request in requests)
        first = [x.times[1] - x.times[0] for x in requests if len(x.times) > 1]
        each = [(x.times[-1] - x.times[1]) / (len(x.times) - 2) for x in requests if x.times[2:]]
        found = {
            "tokens": new,
            "tokens_per_second": new / (max(times) - min(times)) if new else 0.0,
            "steps": self.steps,
            "shared_steps": self.shared_steps,
            "preemptions": sum(request.preemptions for request in requests),
            "pages": self.pool.num_pages,
            "pages_held": self.pool.num_pages - self.pool.available,
            "pages_cached": self.pool.cached,
            "prefix_reused": self._reused_tokens / max(1, self._prompt_tokens),
        }
        for name, values in (("ttft", first), ("tpot", each)):
            for percent in (50, 90, 99):
                value = float(np.percentile(values, percent)) if values else np.nan
                found[f"{name}_p{percent}"] = value
        return found
