"""Run the server several times, and send each request to the replica that holds its text."""
