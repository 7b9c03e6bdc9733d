"""The learner and the front door: data, rewards, TRL adapter, run loop, command line."""
