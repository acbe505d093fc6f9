"""The rollout engine inside a training loop: see rl/engine.py. Imports torch when a name is used, not before."""
