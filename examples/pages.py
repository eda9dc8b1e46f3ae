"""The pages of a KV cache and who holds them: reference counts, prefixes that requests share.

Keys and values depend on a token and all before it, so a full page has a name: a hash of the tokens
up to its end. Requests that begin with the same pages hold them together. A page is in one of three
states: held by one request or more; cached, held by none but named, until another request takes it
by its name or its room is needed; or free. Only full pages are shared, and nobody writes to a full
page, so pages are never copied.

All of this is about numbers of pages. Keys and values are on the device, where steps run in order:
a page may be named, shared or released while the step that fills it or reads it has yet to run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


def extend_names(names: list[bytes], tokens: np.ndarray, page_size: int) -> None:
    """Appends to the names of the first pages of `tokens` those of its other full pages.

    Args:
        names: names of the first len(names) pages.
        tokens: int32 [length].
        page_size: number of tokens of a page.
    """
    for end in range((len(names) + 1) * page_size, len(tokens) + 1, page_size):
        # 128 bits: two prefixes of one name would mix up two requests without a word.
        name = hashlib.blake2b(names[-1] if names else b"", digest_size=16)
        name.update(tokens[end - page_size : end].tobytes())
        names.append(name.digest())


class PagePool:
    """Numbers of the pages of a cache, each held by some requests, cached or free."""

    def __init__(self, num_pages: int, page_size: int):
        """Makes a pool in which all pages are free.

        Args:
            num_pages: number of pages of the cache.
            page_size: number of tokens of a page.
        """
        self.num_pages, self.page_size = num_pages, page_size
        self.holders = [0] * num_pages
        self._free = list(range(num_pages))
        self._cached: dict[int, None] = {}  # in order: the first was released longest ago
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of pages that nobody holds and that could be shared."""
        return len(self._cached)

    def share(self, names: Sequence[bytes]) -> list[int]:
        """Takes the pages of these names, in order, up to the first name that no page has."""
        found = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            self._cached.pop(page, None)
            self.holders[page] += 1
            found.append(page)
        return found

    def take(self, count: int) -> list[int]:
        """Takes pages for new tokens: free ones, then those cached that were released longest ago.

        Raises:
            ValueError: fewer are available.
        """
        if count > self.available:
            raise ValueError(
                f"count is {count} and {self.available} of {self.num_pages} pages are available: "
                "release some first"
            )
        found = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page = next(iter(self._cached))
                del self._cached[page], self._page_of[self._name_of.pop(page)]
            self.holders[page] = 1
            found.append(page)
        return found

    def name(self, pages: Iterable[int], names: Iterable[bytes]) -> None:
        """Names full pages, so that others can share them.

        Of two pages with the same tokens, filled by two requests at the same time, the first to be
        named is shared; the other becomes free when it is released.
        """
        for page, name in zip(pages, names, strict=False):
            if name not in self._page_of and page not in self._name_of:
                self._page_of[name], self._name_of[page] = page, name

    def release(self, pages: Sequence[int]) -> None:
        """Gives back pages of one request, in the order of its tokens.

        The last page is the first whose room is used again: without those before it, it would be
        of no use.
        """
        for page in reversed(pages):
            self.holders[page] -= 1
            if not self.holders[page]:
                if page in self._name_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Checks the pool against the pages of all requests.

        Args:
            tables: pages of each request that holds some.

        Raises:
            RuntimeError: a page in no state or in two, a count that is not that of its holders, or
                a name that does not lead to its page.
        """
        counts, free = [0] * self.num_pages, set(self._free)
        for page in (page for table in tables for page in table):
            counts[page] += 1
        for page, holders in enumerate(counts):
            states = [holders > 0, page in self._cached, page in free]
            if self.holders[page] != holders or sum(states) != 1:
                raise RuntimeError(
                    f"page {page} counts {self.holders[page]} holders and has {holders}; held, "
                    f"cached, free: {states}"
                )
            if page in self._cached and page not in self._name_of:
                raise RuntimeError(f"page {page} is cached and has no name")
        if {page: name for name, page in self._page_of.items()} != self._name_of:
            raise RuntimeError("names and pages do not match")
        if len(self._free) != len(free) or not free.isdisjoint(self._name_of):
            raise RuntimeError("a page is free twice, or free and named")
