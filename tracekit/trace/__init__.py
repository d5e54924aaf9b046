"""A recorded run on disk: shards of Parquet, written crash-safe, read lazily."""
