"""The text tokens of a vocabulary as a trie in flat arrays, to be walked by many automaton states at once.

node 0 is the root; nodes are numbered breadth first, so the children of one lie side by side

first[n] .. first[n] + count[n]       its children       byte[n]: of the edge that leads to n
ids[id_first[n] .. + id_count[n]]     ids spelled by the path to n (several may share their bytes)
id_node[i]                            the node of ids[i]     levels[d]: first node of depth d, and one past its last
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["TokenTrie"]


class TokenTrie:
    """See the module's drawing. Arrays are int32, read-only by habit. Built in about 50 ms for 49 k tokens."""

    def __init__(self, tokens: Sequence[tuple[bytes, int]]) -> None:
        """tokens: (bytes, id), no empty ones."""
        lengths = np.array([len(b) for b, _ in tokens], np.int64)
        flat = np.frombuffer(b"".join(b for b, _ in tokens), np.uint8)
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(tokens) else lengths
        node = np.zeros(len(tokens), np.int64)  # where each token's path has come to
        edge_bytes, parents = [np.zeros(1, np.int64)], [np.full(1, -1, np.int64)]
        made, depth, live = 1, 0, np.arange(len(tokens))
        self.levels = [(0, 1)]
        while True:
            live = live[lengths[live] > depth]
            if not len(live):
                break
            keys, inverse = np.unique(node[live] * 256 + flat[offsets[live] + depth], return_inverse=True)
            node[live] = made + inverse
            parents.append(keys // 256)
            edge_bytes.append(keys % 256)
            self.levels.append((made, made + len(keys)))
            made += len(keys)
            depth += 1
        parent = np.concatenate(parents)
        self.parent = parent
        self.byte = np.concatenate(edge_bytes).astype(np.int32)
        self.count = np.bincount(parent[1:], minlength=made).astype(np.int32)
        # Children are numbered in the order of their parents: each node's lie behind those of all nodes before it.
        self.first = (1 + np.cumsum(self.count) - self.count).astype(np.int32)
        order = np.argsort(node, kind="stable")
        self.ids = np.array([i for _, i in tokens], np.int32)[order]
        self.id_node = node[order]
        self.id_count = np.bincount(node, minlength=made).astype(np.int32)
        self.id_first = (np.cumsum(self.id_count) - self.id_count).astype(np.int32)
        self.num_nodes, self.depth = made, depth
