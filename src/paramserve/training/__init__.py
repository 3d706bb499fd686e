"""What a worker knows of its training function: loops, leases, collectives, and where it is."""
