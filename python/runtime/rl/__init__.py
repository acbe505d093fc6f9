"""The rollout engine: a trainer's weights, versioned caches, samples with both log-probabilities."""
