"""From token ids to what a client reads: detokenizer, stop strings, reasoning, and the collector that holds it."""
