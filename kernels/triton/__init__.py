"""Kernels in Triton, for what FlashInfer lacks: each says in its header which torch function it means."""
