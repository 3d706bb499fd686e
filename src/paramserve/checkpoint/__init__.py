"""Checkpoints on storage: written by several processes, read onto any number of servers.

What is in a checkpoint is decided elsewhere (the cut); this package writes it so that a crash at
any moment leaves the old checkpoint or the new one, and reads back only what was written. No other
package does I/O on these files. A folder of checkpoints:

    owner.json                                  the run that writes here, locked while it lives
    manifest-<n>.json                           checkpoint n is there, and these are its files
    <name>/values/<group>.safetensors           dense values, all servers' ranges in one file
    <name>/state/<state>/<group>.safetensors    one state of the rule, laid out as the values
    <name>/tables/<table>.<shard>.safetensors   rows of one server, sorted by hash
    <name>/sums/<group>.<shard>.safetensors     gradients that wait in a buffer of one server
    <name>/shard-<k>.msgpack, cluster.msgpack   control state
    <name>/worker-<r>.msgpack, .safetensors     what a worker saved, its tensors in the second

**Format** (`tensors`, `manifest`). All tensors are in plain safetensors. The tensors of a group lie
end to end in them as they do over the servers, so a server's share is one range of bytes, which it
writes to its place in the common file: the header follows from the definitions alone. A table's
file has whole columns (`key`, `value`, ...), so that other tools read it too; an increment holds
the rows that changed since the checkpoint before it, and the keys removed. Files are written in
parts of at most 8 MiB; the manifest has the xxh3-128 of each, and each byte of a file is in a part.

**Commit** (`writer`, `folder`, `claims`). Every process writes its files under a new name, syncs
them, and syncs the folders that name them. Only then is the manifest written: to another name,
synced, renamed, and its folder synced. A checkpoint exists if its manifest does. Files are never
changed after that. Pruning removes manifests first, then what no manifest names.

**Reading** (`reader`, `rows`). A byte is used only after the hash of its part was compared. A file
that is missing, shorter, longer or different is refused by file and part, and `folder` goes on to
the checkpoint before. Nothing is unpickled: what a worker saved is plain data (`plain`).

**Storage** (`storage`): a few calls of an operating system, so that a test's disk can stand in for
one, which fails, or loses what was not synced. A URL leads to a store of whole objects
(`locations`, `object_store`): there the files are collected on a local disk and put as a whole, the
ranges that servers write of one file as an object each, and the manifest last.
"""
