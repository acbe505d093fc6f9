"""The language: programs of `gen`, `select` and `fork` that become requests with shared prefixes."""
