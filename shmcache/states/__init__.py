"""State machines of a session: pure, without I/O, clock, thread or lock.

Why: what may follow what is decided here, by tables that a test can walk cell by cell; the layers
above only carry the decisions out. Each machine is guarded by the lock of its owner.
"""
