"""Moving bytes between processes: frames, shared arenas, and who may connect.

It carries headers without reading them, apart from the two that open a connection.
"""
