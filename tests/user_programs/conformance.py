"""A program in the manner of docs/conformance.md."""

from collections.abc import Iterator
from typing import assert_type

import jax
import jax.numpy as jnp

from flash_pallas import conformance


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool = False) -> jax.Array:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def failed() -> list[str]:
    cases = [case for case in conformance.CASES if case.name in ("causal", "softcap")]
    verdicts = conformance.check(attend, cases, dtype="float32")
    assert_type(verdicts, Iterator[conformance.Verdict])
    return [verdict.case for verdict in verdicts if verdict.verdict == "wrong"]


def wrong() -> None:
    conformance.check(attend, ["causal"])  # error
    conformance.check("attend")  # error
    conformance.check(attend, dtype=3)  # error
