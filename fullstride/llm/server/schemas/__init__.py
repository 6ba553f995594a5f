"""Bodies of requests and responses, as /openapi.json describes them."""
