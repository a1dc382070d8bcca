"""HTTP routes, one module per subject."""

API = "/api/v1"
