"""POST /v1/responses: stateless, by way of the chat that says the same."""
