"""`tandem serve`: engines and frontends as processes of one machine, and the model that it serves by default."""
