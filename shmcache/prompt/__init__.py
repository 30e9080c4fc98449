"""Prompt caches and live blocks as files: durable or gone, and verified before a byte is used.

Why: a prefix computed once can serve every later process, and a wrong byte from disk would be a
wrong answer without an error. `publication.py` makes caches, `reading.py` opens them, `live.py`
stores the blocks of a running session; docs/persistence.md tells how they fit.
"""
