"""`tandem top`: a running deployment in the terminal, read over HTTP from its frontends."""
