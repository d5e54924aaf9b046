"""Which keys stay: policies, scorers, and the engine that replays them. Knows no trace, no model."""
