"""What a cache is, declared: who a block belongs to, which shapes a layer keeps, what a prompt
cache promises about itself.

Why: everything that crosses processes or files is a frozen value here, pure and without I/O, so
that two workers, or a writer and a reader a month later, mean the same thing by it.

Not here: no names are re-exported; the public ones come from `shmcache` itself.
"""
