"""Models: what a checkpoint is, and the architectures that run it, written in the words of `backends.base.Ops`."""
