"""Keyed tables on the shard: int64 keys to rows that are created on first use."""
