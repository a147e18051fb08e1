"""Read requests and write answers in the forms of other servers' APIs."""
