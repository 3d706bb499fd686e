"""How fast paramserve is, beside Ray actors, torch RPC and bare processes in the same run."""
