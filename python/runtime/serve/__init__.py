"""The OpenAI-compatible server: routes, guard, life cycle."""
