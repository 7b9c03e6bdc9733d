"""The shell around inference engines: workers, Ray actors, placement, the pool, weight transfer."""
