"""Measurements of drafting, each in one interleaved run: ``spec``, ``useless_drafter``, ``calibrate``.

All of them start their engines through :mod:`rollout.bench_engine`, take prompts from :mod:`trainer.bench.workload`
and end with one JSON line.
"""
