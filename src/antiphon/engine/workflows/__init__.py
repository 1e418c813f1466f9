"""Background responses as workflows of DBOS. Loaded only where it is wanted: importing DBOS takes long."""
