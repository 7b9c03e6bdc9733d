"""How many tokens to draft in each engine step: pure decisions, driven alike by the live engine and the simulator.

- :mod:`tlt.spec.attribution` pairs an engine step with the one that verifies its drafts;
- :mod:`tlt.spec.acceptance` turns accepted drafts into expected tokens, :mod:`tlt.spec.step_time` predicts seconds;
- :mod:`tlt.spec.policy` chooses, per bucket of batch sizes (:mod:`tlt.spec.buckets`);
- :mod:`tlt.spec.watchdog` judges a drafter against what was promised, :mod:`tlt.spec.store` keeps what was learned;
- :mod:`tlt.spec.totals` holds the counts behind metrics.

Nothing here reads a clock or draws unseeded random numbers. Acceptance length means, everywhere, the mean number of
accepted draft tokens per verification plus one, pooled over requests.
"""
