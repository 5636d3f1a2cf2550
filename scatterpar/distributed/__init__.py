"""Several processes, one per machine: collectives, and the exchange of a step."""
