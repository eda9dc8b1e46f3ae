"""The serving example: its pages, the order of its steps, its tokens against one request alone."""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from flash_pallas.core import shared_prefix
from flash_pallas.core.decode import DecodeOperands

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))  # the examples import one another as scripts do

import engine as serving  # noqa: E402
import serve  # noqa: E402
from generate import untrained  # noqa: E402
from pages import PagePool, extend_names  # noqa: E402

from .test_examples import run, train  # noqa: E402

SIZES = 2, 32, 4, 2, 8
PAGE, CONTEXT = 16, 128
# Few pages: eight sequences of this length would need 64. The same sizes in all tests, so that they
# share two compiled programs.
LIMITS = {
    "num_pages": 20,
    "page_size": PAGE,
    "max_context": CONTEXT,
    "max_seqs": 8,
    "max_tokens_per_step": 64,
}


@pytest.fixture
def verify(monkeypatch):
    """Verification with the promotion of dtypes that jax has outside of tests.

    Flax's norms of float64 promote with float32. Programs traced with another promotion are others,
    so that it holds here only.
    """
    original = serve.verify

    def verified(*arguments):
        with jax.numpy_dtype_promotion("standard"):
            return original(*arguments)

    monkeypatch.setattr(serve, "verify", verified)
    return verified


@functools.cache
def tiny():
    return untrained(SIZES, argparse.Namespace(backend="auto", seed=0))


@pytest.fixture
def model():
    """A model of two layers with random parameters, the same in all tests."""
    return tiny()


class TokenPages:
    """A device in place of a model: pages hold tokens, and the next token is a checksum of all.

    It fails where an engine would compute garbage: a page that another sequence has overwritten, or
    that was shared without holding the tokens it is named after, changes every later token.
    """

    def __init__(self, engine):
        self.shape = engine.max_seqs, engine.max_pages
        self.pages = np.full((engine.pool.num_pages, engine.pool.page_size), -1, np.int32)
        self.engine, self.batches = engine, []
        engine._run = self.run

    def run(self, sheet):
        batch = serving.Batch.views(sheet, *self.shape)
        before, after = np.asarray(self.engine._flight.sampled), np.zeros(self.shape[0], np.int32)
        self.batches.append(batch)
        ends = np.cumsum(batch.counts)
        places = []
        for row, (count, length) in enumerate(zip(batch.counts, batch.lengths, strict=True)):
            new = batch.tokens[ends[row] - count : ends[row]]
            new = [before[-1 - token] if token < 0 else token for token in new]
            at = np.arange(length)
            places.append((batch.page_table[row, at // PAGE], at % PAGE))
            self.pages[tuple(x[length - count :] for x in places[-1])] = new
        for row, place in enumerate(places):
            after[row] = checksum(self.pages[place])
        return after


def checksum(tokens):
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % 256


def checksums(prompt, count, **_):
    """Returns the tokens that `TokenPages` generates for a request alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(checksum(tokens))
    return tokens[len(prompt) :]


@functools.partial(jax.jit, static_argnums=0)
def generated(graph, params, tokens, length, count, temperature, seed):
    """Generates one token after the other from all tokens before, without a cache."""
    model = nnx.merge(graph, params)

    def add(index, tokens):
        logits = model(tokens[None])[0, index - 1]
        return tokens.at[index].set(serving.sample(logits, seed, index, temperature))

    return lax.fori_loop(length, length + count, add, tokens)


def alone(model, prompt, count, temperature=0.0, seed=0):
    """Returns the tokens that the model generates for one request alone."""
    tokens = np.zeros(CONTEXT, np.int32)
    tokens[: len(prompt)] = prompt
    options = np.float32(temperature), np.int32(seed)
    found = generated(*nnx.split(model), tokens, len(prompt), count, *options)
    return np.asarray(found)[len(prompt) : len(prompt) + count].tolist()


def requests(seed, number):
    """Returns (prompt, max_new_tokens, options) of requests, of which a third begins alike."""
    random = np.random.default_rng(seed)
    system = random.integers(256, size=40)
    found = []
    for i in range(number):
        prompt = random.integers(256, size=random.integers(1, 25))
        prompt = np.concatenate([system, prompt]) if i % 3 == 0 else prompt
        temperature = float(random.choice([0.0, 0.8]))
        found.append((prompt, int(random.integers(1, 64)), {"temperature": temperature, "seed": i}))
    return found


def served(engine, calls, cancel_at=None, check=True):
    """Serves requests to the end, cancels those that are named after so many steps."""
    for prompt, count, options in calls:
        engine.submit(prompt, count, **options)
    events, steps = [], 0
    while not engine.idle:
        for number in (cancel_at or {}).get(steps, ()):
            engine.cancel(number)
        events += engine.step()
        if check:
            engine.check()
        steps += 1
        assert steps < 10_000
    return events


@pytest.mark.thorough
def test_tokens_are_those_of_each_request_alone(model):
    engine = serving.Engine(model, **LIMITS)
    calls = requests(0, 40)
    cancel_at = {0: [30], 5: [1], 20: [6, 39], 40: [9, 12]}
    events = served(engine, calls, cancel_at)
    assert engine.programs[False]._cache_size() == len(engine.token_sizes) == 2
    assert engine.programs[True]._cache_size() <= 2
    said = engine.statistics()
    assert said["preemptions"] > 0 and said["prefix_reused"] > 0.1 and said["pages_held"] == 0
    cancelled = {number for numbers in cancel_at.values() for number in numbers}
    for number, (prompt, count, options) in enumerate(calls):
        request = engine.requests[number]
        wanted = alone(model, prompt, count, **options)
        told = [token for name, token, _ in events if name == number]
        ended = [end for name, _, end in events if name == number]
        if number in cancelled and request.state == "cancelled":
            wanted = wanted[: len(told)]
            assert not any(ended)
        else:
            assert request.state == "length" and ended == [False] * (count - 1) + [True]
        assert told == request.new_tokens == wanted, number
    states = [request.state for request in engine.requests.values()]
    assert states.count("cancelled") >= 4


def test_sharing_prefixes_changes_no_token(model):
    calls = [call for call in requests(1, 12) if len(call[0]) > 40]
    found = []
    for share in (True, False):
        engine = serving.Engine(model, share_prefixes=share, **LIMITS)
        served(engine, calls)
        found.append([request.new_tokens for request in engine.requests.values()])
        assert (engine.statistics()["prefix_reused"] > 0.3) == share
        assert (engine.pool.cached > 0) == share
    assert found[0] == found[1]


def test_common_pages_are_read_once_where_that_saves_half(model):
    prompt, found = np.random.default_rng(3).integers(0, 256, 3 * PAGE + 1).tolist(), []
    for share in (True, False):
        engine = serving.Engine(model, share_prefixes=share, **LIMITS)
        engine.submit(prompt, 2)
        while not engine.idle:
            engine.step()
        alone = engine.shared_steps
        for last in range(4):
            engine.submit([*prompt, last], 6)
        while not engine.idle:
            engine.step()
        assert alone == 0 and (engine.shared_steps >= 5) == share
        found.append([request.new_tokens for request in engine.requests.values()])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("lengths", "table", "saves"),
    [
        ([33, 33], [[7, 8, 1], [7, 8, 2]], False),  # 32 of 66 keys
        ([33, 33, 33], [[7, 8, 1], [7, 8, 2], [7, 8, 3]], True),  # 64 of 99
        ([33, 33, 33], [[7, 8, 1], [7, 9, 2], [7, 8, 3]], False),  # all three have one page
        ([33, 33, 200], [[7, 8, 1], [7, 8, 2], [7, 8, 3]], False),
        ([32, 32, 32], [[7, 8, 0], [7, 8, 0], [7, 8, 0]], False),  # the last page has a new token
        ([33], [[7, 8, 1]], False),
    ],
)
def test_what_common_pages_save(lengths, table, saves):
    rows, width = 5, len(table[0])
    sheet = np.zeros(16 + rows * (4 + width), np.int32)
    batch = serving.Batch.views(sheet, rows, width)
    batch.lengths[: len(lengths)], batch.page_table[: len(table)] = lengths, table
    batch.counts[: len(lengths)] = 1
    batch.counts[4], batch.lengths[4] = 12, 1000  # of a prompt, which is no step
    assert serving.saves_half(batch, 16) == saves


@pytest.mark.parametrize("seed", range(20))
def test_the_host_counts_what_the_device_shares(seed):
    rng, rows = np.random.default_rng(seed), 6
    lengths = rng.integers(1, 4 * PAGE + 1, rows).astype(np.int32)
    drawn = (rng.random((rows, 4)) < [0.4, 0.1, 0.1, 0.1]).astype(np.int32)
    table = np.where(np.arange(4) * PAGE < lengths[:, None], drawn, 0)
    batch = serving.Batch.views(np.zeros(8 + rows * 8, np.int32), rows, 4)
    batch.counts[:], batch.lengths[:], batch.page_table[:] = 1, lengths, table
    q, pages = np.zeros((rows, 1, 1, 8), np.float32), np.zeros((2, PAGE, 1, 8), np.float32)
    operands = DecodeOperands(q, pages, pages, lengths, None, jnp.asarray(batch.page_table))
    prefix = np.asarray(shared_prefix.sharing(operands, 1).prefix)
    once = sum(prefix[table[:, 0] == first].max(initial=0) for first in range(2))
    assert serving.saved_keys(batch, PAGE) == prefix.sum() - once


def test_batch_by_batch_takes_more_steps_for_the_same_tokens(model):
    calls, steps, found = requests(2, 16), [], []
    for one_by_one in (False, True):
        limits = LIMITS | {"max_seqs": 4, "num_pages": 64}
        engine = serving.Engine(model, batch_by_batch=one_by_one, **limits)
        ended, begun_late = set(), 0
        for prompt, count, options in calls:
            engine.submit(prompt, count, **options)
        while not engine.idle:
            running = {request.id for request in engine._running}
            ended |= {number for number, _, end in engine.step() if end}
            new = {request.id for request in engine._running} - running
            begun_late += bool(new and running - ended and ended & running)
        assert (begun_late == 0) == one_by_one
        steps.append(engine.steps)
        found.append([request.new_tokens for request in engine.requests.values()])
    assert found[0] == found[1] and steps[1] > 1.2 * steps[0]


def test_streams_take_turns_and_stop_at_a_token(model):
    engine = serving.Engine(model, **LIMITS)
    prompt = np.arange(20)
    whole = alone(model, prompt, 12)
    first = engine.submit(prompt, 12)
    second = engine.submit(prompt, 12, stop=[whole[4]])
    stream = engine.stream(first)
    assert [next(stream) for _ in range(3)] == whole[:3]
    assert list(engine.stream(second)) == whole[: whole.index(whole[4]) + 1]
    assert list(stream) == whole[3:] and list(engine.stream(first)) == whole
    assert engine.requests[second].state == "stop"
    for number in (first, second):
        assert not engine.cancel(number)
        engine.forget(number)
    assert engine.step() == [] and engine.idle and not engine.requests


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_requests_and_cancellations(model, seed):
    random = np.random.default_rng(seed)
    limits = LIMITS | {"num_pages": int(random.integers(8, 30)), "max_seqs": 6 + seed % 3}
    engine = serving.Engine(model, share_prefixes=seed != 5, **limits)
    device, calls, cancelled = TokenPages(engine), requests(seed, 80), set()
    waiting, ended, most = list(enumerate(calls))[::-1], set(), 0
    while waiting or not engine.idle:
        for _ in range(random.integers(3) if waiting else 0):
            number, (prompt, count, options) = waiting.pop()
            assert engine.submit(prompt, count, **options) == number
            if not waiting:
                break
        if engine.requests and random.random() < 0.05:
            number = int(random.integers(len(engine.requests)))
            if engine.cancel(number):
                cancelled.add(number)
                ended.add(number)
        for number, _, end in engine.step():
            assert number not in ended
            ended |= {number} if end else set()
        engine.check()
        most += 1
        assert most < 10_000
    for number, (prompt, count, _) in enumerate(calls):
        request = engine.requests[number]
        wanted = checksums(prompt, count)
        assert request.state == ("cancelled" if number in cancelled else "length")
        assert request.new_tokens == wanted[: len(request.new_tokens)]
        assert number in cancelled or len(request.new_tokens) == count
    begun = [x.times[1] for x in engine.requests.values() if x.id not in cancelled]
    assert begun == sorted(begun)  # first come, first served
    for batch in device.batches:
        assert 0 < batch.counts.sum() <= engine.token_sizes[-1]
        assert len(batch.tokens) in engine.token_sizes


def test_generating_sequences_come_before_prompts(model):
    engine = serving.Engine(model, **LIMITS | {"num_pages": 64})
    device = TokenPages(engine)
    for _ in range(3):
        engine.submit(np.arange(5), 40)
    for _ in range(3):
        engine.step()
    for start in (0, 100):
        engine.submit(np.arange(start, start + 100), 5)
    for _ in range(5):
        engine.step()
    counts = [batch.counts[batch.counts > 0].tolist() for batch in device.batches]
    assert counts[:3] == [[5, 5, 5], [1, 1, 1], [1, 1, 1]]
    # A step has 64 tokens: the rest of a prompt, then the beginning of the next.
    assert counts[3:6] == [[1, 1, 1, 61], [1, 1, 1, 39, 22], [1, 1, 1, 1, 60]]
    assert counts[6:] == [[1, 1, 1, 1, 18], [1, 1, 1, 1, 1]]
    assert [len(batch.tokens) for batch in device.batches] == [16] * 3 + [64] * 4 + [16]


def test_the_youngest_is_preempted_and_goes_on_where_it_was(model):
    engine = serving.Engine(model, **LIMITS | {"num_pages": 8})
    TokenPages(engine)
    calls = [(np.arange(i, i + 20), 80, {}) for i in range(3)]
    served(engine, calls)
    found = [engine.requests[number] for number in range(3)]
    assert [request.new_tokens for request in found] == [checksums(*call[:2]) for call in calls]
    assert found[0].preemptions == 0 < found[1].preemptions <= found[2].preemptions
    ended = [request.times[-1] for request in found]
    assert ended == sorted(ended)


def test_a_page_is_left_to_each_running_sequence(model):
    engine = serving.Engine(model, **LIMITS | {"num_pages": 9})
    TokenPages(engine)
    engine.submit(np.arange(10), 60)
    for _ in range(10):
        engine.step()  # It has two pages now.
    engine.submit(np.arange(100, 212), 10)
    for _ in range(5):
        engine.step()
        assert [request.state for request in engine.requests.values()] == ["running", "waiting"]
    while not engine.idle:
        engine.step()
    assert engine.requests[1].preemptions == 0


def test_cached_pages_are_used_before_prompts_are_computed(model):
    engine = serving.Engine(model, **LIMITS)
    device = TokenPages(engine)
    prompt = np.arange(50)
    served(engine, [(prompt, 20, {})])
    assert engine.pool.cached == 4  # 69 keys
    answer = engine.requests[0].new_tokens
    # A conversation that goes on; then the same prompt, whose last token is computed in any case.
    served(engine, [(np.concatenate([prompt, answer[:14], [7]]), 5, {}), (prompt[:48], 5, {})])
    assert [batch.counts[:2].tolist() for batch in device.batches[20:21]] == [[1, 16]]


def test_pages_that_a_cancelled_request_has_not_filled_are_not_shared(model):
    engine = serving.Engine(model, **LIMITS)
    device, prompt = TokenPages(engine), np.arange(100)
    engine.cancel(engine.submit(prompt, 5))
    first = engine.submit(prompt, 5)
    engine.step()
    engine.cancel(first)
    served(engine, [(prompt, 5, {})])
    assert [batch.counts[0] for batch in device.batches[:2]] == [64, 36]
    assert engine.requests[2].new_tokens == checksums(prompt, 5)


REFUSED = [
    ({"prompt": [], "max_new_tokens": 4}, r"prompt has shape \(0,\) and .* at least one"),
    ({"prompt": [0.5], "max_new_tokens": 4}, r"dtype float64: it must be integers \[length\]"),
    ({"prompt": [1], "max_new_tokens": 4, "seed": 2**31}, r"seed is 2147483648: .* \[0, 2\*\*31\)"),
    ({"prompt": [3, 256], "max_new_tokens": 4}, r"from 3 to 256: they must be in \[0, 256\)"),
    ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens is 0: it must be at least 1"),
    ({"prompt": [1], "max_new_tokens": 4, "temperature": -1.0}, "temperature is -1.0: it must be"),
    (
        {"prompt": [1] * 100, "max_new_tokens": 29},
        "prompt has 100 tokens and max_new_tokens is 29, 129 together: a sequence has room for "
        r"128 \(max_context, and 20 pages of 16\). Shorten the prompt, lower max_new_tokens, or",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_requests_that_are_refused(model, call, message):
    engine = serving.Engine(model, **LIMITS)
    with pytest.raises(ValueError, match=message):
        engine.submit(**call)
    assert engine.idle and not engine.requests


def test_engines_and_ids_that_are_refused(model):
    with pytest.raises(ValueError, match="max_tokens_per_step is 7 and max_seqs 8: every sequence"):
        serving.Engine(model, **LIMITS | {"max_tokens_per_step": 7})
    engine = serving.Engine(model, **LIMITS | {"num_pages": 3})
    assert engine.max_context == 48
    with pytest.raises(ValueError, match="no request has the id 0: pass what submit returned"):
        engine.cancel(0)
    engine.submit([1], 1)
    with pytest.raises(ValueError, match="request 0 has not ended: cancel it first"):
        engine.forget(0)


@pytest.mark.parametrize("seed", range(20))
def test_pages_by_random_operations(seed):
    """Notes what each page holds: what is shared has the tokens that it is named after."""
    random = np.random.default_rng(seed)
    size, pool, held, content = 4, PagePool(12, 4), [], {}
    for _ in range(300):
        action = random.integers(3)
        if action == 0 and held:
            pool.release(held.pop(random.integers(len(held))))
        elif action == 1 and held:
            table = held[random.integers(len(held))]
            count = int(random.integers(1, 3))
            if count <= pool.available:
                table += (new := pool.take(count))
                content |= dict.fromkeys(new, None)
        else:
            tokens = random.integers(2, size=4 * random.integers(1, 4)).astype(np.int32)
            names: list[bytes] = []
            extend_names(names, tokens, size)
            table = pool.share(names)
            for page, end in zip(table, range(size, len(tokens) + 1, size), strict=False):
                assert content[page] == tokens[:end].tolist()
            if len(names) - len(table) > pool.available:
                pool.release(table)
                continue
            table += pool.take(len(names) - len(table))
            for page, end in zip(table, range(size, len(tokens) + 1, size), strict=True):
                content[page] = tokens[:end].tolist()
            pool.name(table, names)
            held.append(table)
        pool.check(held)
    with pytest.raises(ValueError, match=r"count is 13 and \d+ of 12 pages are available: release"):
        pool.take(13)


def test_the_end_of_a_prefix_makes_room_before_its_beginning():
    pool, names = PagePool(3, 4), []
    extend_names(names, np.arange(12, dtype=np.int32), 4)
    pages = pool.take(3)
    pool.name(pages, names)
    pool.release(pages)
    assert pool.take(1) == pages[2:] and pool.share(names) == pages[:2]


def test_faults_of_pages_are_found():
    pool = PagePool(4, 16)
    pages = pool.take(2)
    pool.check([pages])
    for tables in ([], [pages, pages], [pages[:1]]):
        with pytest.raises(RuntimeError, match="counts 1 holders and has"):
            pool.check(tables)
    pool._free.append(pages[0])
    with pytest.raises(RuntimeError, match="held, cached, free: "):
        pool.check([pages])


FLAGS = [
    *("--requests", 30, "--pages", 20, "--page-size", 16, "--max-seqs", 8, "--max-tokens", 64),
    *("--prompt-bytes", 4, 24, "--new-bytes", 8, 64, "--system-bytes", 40, "--random", *SIZES),
]


def test_a_load_is_served_and_verified(model, verify, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serve, "untrained", lambda *_: model)
    flags = [*FLAGS, "--verify", "--cancel-share", 0.2, "--json", tmp_path / "said.json"]
    assert serve.main(list(map(str, flags))) == 0
    said = capsys.readouterr()
    assert (
        "tokens are not the oracle's choice, all within rounding\n" in said.out
        and said.out.endswith("\n0 faults\n")
    )
    assert "30/30 requests" in said.err and "0/20 pages held" in said.err
    assert (tmp_path / "said.json").exists()


def test_what_is_lost_or_wrong_is_found(model, verify):
    arguments = serve.parse_arguments(list(map(str, FLAGS)))
    arrivals = [x for x in serve.load(arguments) if x.cancel_after is None][:3]
    engine = serving.Engine(model, **LIMITS)
    serve.serve(engine, arrivals)
    requests = list(engine.requests.values())
    assert serve.lost(engine, arrivals) == [] and verify(model, requests)[1] == []
    tokens = requests[1].tokens
    tokens[-1] = (tokens[-1] + 1) % 256
    (wrong,) = verify(model, requests)[1]
    assert wrong.startswith("request 1 is ")
    requests[2].times.pop()
    requests[0].pages = engine.pool.take(2)
    engine._waiting.append(requests[0])
    first, second, third = serve.lost(engine, [*arrivals, arrivals[0]])[1:]
    assert first.startswith("request 2 is length with") and second == "2 pages are still held"
    assert third == "requests [] are waiting, and [0] in the queue"


@pytest.mark.thorough
def test_serving_as_a_script(tmp_path):
    output = run("serve.py", *FLAGS, "--rate", 100, cwd=tmp_path)
    assert output.endswith("\n0 faults\n") and "tokens/s" in output


@pytest.mark.thorough
def test_serving_from_a_checkpoint(tmp_path):
    train(tmp_path)
    output = run("serve.py", *FLAGS, "--checkpoint", "out", "--verify", cwd=tmp_path)
    assert "all within rounding" in output and output.endswith("\n0 faults\n")
