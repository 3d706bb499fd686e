"""Keyed tables on the shard: int64 keys to rows that pushes create."""
