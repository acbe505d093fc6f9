"""Benchmarks: one file a question, one JSON line a run. Run as modules: `python -m benchmarks.race`."""
