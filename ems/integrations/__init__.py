"""EMS inside other people's engines; each module needs its engine only when it is imported."""
