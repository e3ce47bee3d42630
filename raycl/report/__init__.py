"""The report of a run: one HTML page of what its output holds. Knows neither torch nor Ray."""
