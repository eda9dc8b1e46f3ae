"""Names of arguments: one signature for several functions, and hints for wrong names."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection

# Names of one thing: ours, and those of jax.nn, PyTorch, flash-attn, Tokamax, kvax and MaxText.
SYNONYMS = (
    "q query",
    "k key",
    "v value",
    "causal is_causal",
    "window local_window_size window_size sliding_window sliding_window_size",
    "scale sm_scale softmax_scale logits_scale query_scale",
    "softcap soft_cap logit_cap logits_soft_cap attn_logits_soft_cap",
    "mask attn_mask attention_mask",
    "bias attn_bias attention_bias ab",
    "q_segment_ids query_segment_ids segment_ids",
    "kv_segment_ids key_segment_ids segment_ids",
    "q_lengths query_seq_lengths q_seqlen seqused_q",
    "kv_lengths key_value_seq_lengths kv_seqlen seqused_k cache_seqlens lengths",
    "sinks s_aux softmax_aux learnable_sink attention_sink",
    "alibi_slopes slopes alibi",
    "dropout_rate dropout dropout_p",
    "dropout_seed dropout_rng dropout_key rng",
    "q_offset query_offset q_start",
    "return_lse return_residual return_residuals return_softmax_lse",
    "page_table block_table block_tables page_indices",
    "blocks block_sizes",
    "backend implementation impl",
)


def unexpected(function: str, wrong: Collection[str], names: Collection[str]) -> str:
    """Returns the message of a TypeError for unknown arguments, which says what was meant.

    Args:
        function: name of the function.
        wrong: the arguments that it does not have.
        names: those that it has.
    """
    listed = ", ".join(map(repr, sorted(wrong)))
    plural = "s" if len(wrong) > 1 else ""
    meant = {ours: None for name in sorted(wrong) for ours in _meant(name, names)}
    hint = f"; did you mean {' and '.join(map(repr, meant))}?" if meant else ""
    return f"{function}() got an unexpected keyword argument{plural} {listed}{hint}"


def _meant(name: str, names: Collection[str]) -> list[str]:
    """Returns those of `names` that are synonyms of `name`, else the one most like it."""
    groups = [group.split() for group in SYNONYMS if name in group.split()]
    found = [other for group in groups for other in group if other in names]
    return found or difflib.get_close_matches(name, names, 1)


def suggested[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Wraps `function` so that its TypeError for an unknown argument says which one was meant."""
    names = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not names.issuperset(kwargs):
            raise TypeError(unexpected(function.__name__, kwargs.keys() - names, names))
        return function(*args, **kwargs)

    return checked


def same_arguments(original: Callable):
    """Returns a decorator that gives a (q, k, v, **options) the signature of `original`.

    Keyword arguments of the decorated function that `original` does not have come after those.
    """
    return functools.partial(_with_signature, inspect.signature(original))


def _with_signature(whole: inspect.Signature, function):
    own = inspect.signature(function)
    added = [
        parameter
        for name, parameter in own.parameters.items()
        if name not in whole.parameters and parameter.kind is parameter.KEYWORD_ONLY
    ]
    signature = whole.replace(
        parameters=[*whole.parameters.values(), *added], return_annotation=own.return_annotation
    )

    @functools.wraps(function)
    def bound(*args, **kwargs):
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        return function(**arguments)

    bound.__signature__ = signature  # pyright: ignore
    return suggested(bound)
