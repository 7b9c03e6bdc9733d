"""Metrics, logs, progress, timeline and provenance: what a person sees of a run."""
