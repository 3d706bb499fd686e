"""Engines start processes, tell when one ends, and stop them: nothing else.

`base` is the contract, `local` starts child processes of the driver and `on_ray` actors of a Ray
cluster; `child` is what runs in them. A child imports this package, so nothing is imported here:
start-up must stay fast.
"""
