"""`paramserve plan`: what a cluster of a given size would do, from a model of its parts.

`command` reads the options, `setting` is the question, `model` plays it with the policies of
`core`, `shards` asks it about several numbers of shards, `calibrate` measures this machine, `show`
prints and draws.
"""
