"""The server: moves bytes for `core.shard`, which decides everything."""

from paramserve.server.process import main, new_shard, prepare_process, process_role, register
from paramserve.server.role import Control, ServerRole

__all__ = [
    "Control",
    "ServerRole",
    "main",
    "new_shard",
    "prepare_process",
    "process_role",
    "register",
]
