"""Programs that use a pool as its users do, to prove and to measure: public API only."""
