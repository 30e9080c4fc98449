"""One live model cache in one worker: blocks between device, host and disk under finite budgets.

Read in this order: options.py (limits), backend.py (what an engine supplies), session.py (what a
user calls), core.py (what all parts share), then the part of interest: tails.py (growth),
balance.py (eviction), demotions.py, disk.py, reading.py (leases), shrinking.py, generations.py;
sharing.py, matching.py, fixed_state.py (what workers compute for each other),
prompt_saving.py and prompt_loading.py (what outlives them on disk).
"""
