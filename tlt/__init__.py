"""Pure core: types, errors, configuration, decisions, observability. Imports neither Ray nor vLLM."""
