"""The pool: a shared segment, the accounting handle on it, its tokens, blocks and owners.

Not here: no names are re-exported; the public ones come from `shmcache` itself.
"""
